"""The command line as a user meets it: help, faults, statuses."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kilburn.shared.model_files import BUNDLED_NAME
from tests.worker.tiny_models import make_tiny


def kilburn(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kilburn.controller.cli", *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["help"], ["-h"]])
def test_without_a_command_it_says_what_there_is(words: list[str]) -> None:
    done = kilburn(*words)
    assert done.returncode == 0
    for word in ("serve", "controller", "worker", "plan", "keys", BUNDLED_NAME):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["serve", "controller", "worker", "plan", "keys"])
def test_every_command_has_its_help(command: str) -> None:
    done = kilburn(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: kilburn {command}")


def test_the_version_is_one_line() -> None:
    done = kilburn("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kilburn ")


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    done = kilburn("sreve")
    assert done.returncode == 2
    assert "did you mean serve?" in done.stderr


@pytest.mark.parametrize("command", ["serve", "controller", "worker"])
def test_all_faults_come_at_once_and_nothing_is_started(command: str) -> None:
    done = kilburn(command, "--max-step-tokens", "x", "--nonsense", "1", KILBURN_PROT="1")
    assert done.returncode == 2
    for part in (
        "4 settings need a change",
        "--max-step-tokens: 'x'",
        "--nonsense",
        "KILBURN_PROT",
        "--model: missing",
    ):
        assert part in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["serve", "controller", "worker"])
def test_a_model_that_is_not_there_is_named(command: str, tmp_path: Path) -> None:
    done = kilburn(command, str(tmp_path / "none"))
    assert done.returncode == 2
    assert str(tmp_path / "none") in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_are_made_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = kilburn("keys", "new", str(folder), "gpu-1", "gpu-2")
    assert done.returncode == 0, done.stderr
    assert {file.name for file in folder.iterdir()} == {"controller.key", "workers.allow", "gpu-1.key", "gpu-2.key"}
    for file in folder.iterdir():
        assert str(file) in done.stdout
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    before = (folder / "controller.key").read_bytes()
    again = kilburn("keys", "new", str(folder))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert (folder / "controller.key").read_bytes() == before


def test_keys_without_a_folder_is_a_fault() -> None:
    assert kilburn("keys", "new").returncode == 2


def test_a_plan_is_printed_as_a_table_and_as_json_without_torch(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    words = ("plan", str(folder), "--memory", "1GiB", "--dtype=bf16", "--lengths=64,512", "--host-pool=1MiB")
    table = kilburn(*words)
    assert (table.returncode, table.stderr) == (0, "")
    for part in ("weights", "KV per token", "host pool", "bfloat16", "tail waste"):
        assert part in table.stdout
    # A controller's machine may have none of this: were it imported, this would fail.
    for name in ("torch", "numpy", "transformers", "safetensors"):
        (tmp_path / "absent" / name).mkdir(parents=True)
        (tmp_path / "absent" / name / "__init__.py").write_text("raise SystemExit('imported')")
    written = json.loads(kilburn(*words, "--json", PYTHONPATH=str(tmp_path / "absent")).stdout)
    assert written["num_blocks"] > 0
    assert [row["tokens"] for row in written["sequences"]] == [64, 512]
    assert str(written["num_blocks"]) in table.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ["--memory: missing"]),
        (("--memory=1MiB",), ["--memory: 1.00 MiB", "MiB or more"]),
        (("--memory=1GiB", "--tp=3"), ["--tp 3", "give one of 1, 2"]),
        (("--memory=1GiB", "--host-pool=2GiB", "--host-memory=1GiB"), ["--host-pool", "give 1024MiB or less"]),
        (("--memory=1GiB", "--lengths=0"), ["--lengths", "give whole numbers from 1"]),
    ],
)
def test_a_plan_that_cannot_be_says_what_to_change(tmp_path: Path, flags: tuple[str, ...], words: list[str]) -> None:
    done = kilburn("plan", str(make_tiny(tmp_path, with_tokenizer=False)), *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
