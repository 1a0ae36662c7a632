"""The runner's own promises: budgets are held, and under CI nothing is set aside in silence."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.suites import BUDGETS_S, counted, longest_s, run

INSTALL_S = 300  # what `.ci/run` takes before the first suite, on a machine that has nothing


def test_the_budgets_keep_the_promise_of_25_minutes_and_cover_every_folder() -> None:
    assert INSTALL_S + longest_s(BUDGETS_S) <= 25 * 60
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders <= BUDGETS_S.keys()


def test_what_is_at_its_limit_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    status, _ = asyncio.run(run([sys.executable, "-c", code], limit_s=3))
    assert status is None
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):  # it is gone, perhaps between a look and the next
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "its child lives on"
            time.sleep(0.01)


SET_ASIDE = {
    "passes": ("def test(): pass", 0),
    "fails": ("def test(): assert False", 1),
    "skips": ("import pytest\ndef test(): pytest.skip('not today')", 1),
    "skips as a whole": ("import pytest\npytest.skip('not here', allow_module_level=True)", 1),
    "marked": ("import pytest\n@pytest.mark.skip\ndef test(): pass\ndef test_2(): pass", 1),
    "expected to fail": ("import pytest\n@pytest.mark.xfail\ndef test(): assert False", 1),
    "passes unexpectedly": ("import pytest\n@pytest.mark.xfail\ndef test(): pass", 1),
}


@pytest.mark.parametrize("case", SET_ASIDE)
def test_under_ci_a_test_that_is_set_aside_fails_the_run(tmp_path: Path, case: str) -> None:
    code, status = SET_ASIDE[case]
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    environ = os.environ | {"CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == status
    passed, failed = counted(tmp_path / "report.xml")
    assert (passed, failed) == {"passes": (1, 0), "fails": (0, 1)}.get(case, (passed, 0))
