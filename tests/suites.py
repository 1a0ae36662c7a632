"""The whole suite: lint, then each folder of tests, in order, each within a budget of seconds.

`python tests/suites.py [suite ...]`. A budget is what a suite may take on two cores that do nothing else. One that is
over it is named; at PATIENCE times its budget it is stopped and has failed, as has one that ran no test. The last line
sums up every pytest run: `N passed, N failed`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent

# Seconds; their sum is the promise of 25 minutes.
BUDGETS_S = {
    "lint": 35,
    "architecture": 45,
    "core": 50,
    "sim": 215,
    "wire": 50,
    "kernels": 195,
    "triton": 290,
    "worker": 160,
    "api": 60,
    "page": 60,
    "system": 340,
}
PATIENCE = 1.7  # with a machine that others use too
LAST_WORDS_S = 10.0
LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy", "-p", "kilburn.shared", "-p", "kilburn.controller"),
)


@dataclass(frozen=True)
class Outcome:
    suite: str
    seconds: float
    passed: int
    failed: int
    fault: str  # empty: none


def run(command: list[str], limit_s: float) -> tuple[int | None, float]:
    """Exit status (None: stopped at the limit) and seconds taken. What it started ends with it."""
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_s), time.monotonic() - begun
    except subprocess.TimeoutExpired:
        taken_s = time.monotonic() - begun
        process.send_signal(signal.SIGINT)  # pytest then says where it was
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        return None, taken_s
    finally:
        with contextlib.suppress(ProcessLookupError):  # its whole session may have ended with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lint(_suite: str, limit_s: float) -> Outcome:
    taken_s, faults = 0.0, []
    for tool, *words in LINT:
        status, seconds = run([sys.executable, "-m", tool, *words], max(limit_s - taken_s, 0.1))
        taken_s += seconds
        if status != 0:
            faults.append(f"{tool} {words[0]} " + ("was stopped" if status is None else "found faults"))
    return Outcome("lint", taken_s, 0, 0, "; ".join(faults))


def counted(report: Path) -> tuple[int, int]:
    """(passed, failed) of a JUnit file; a pytest that died half way has written none."""
    if not report.exists():
        return 0, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    passed = failed = 0
    for suite in suites:
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    return passed, failed


def tests(suite: str, limit_s: float) -> Outcome:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", f"tests/{suite}", f"--junitxml={report}", "--durations=5", "-o", "junit_family=xunit2"]
        status, seconds = run([sys.executable, "-m", "pytest", *words], limit_s)
        passed, failed = counted(report)
    match status:
        case 0:
            fault = ""
        case None:
            fault = f"stopped after {limit_s:.0f} s"
        case 5:
            fault = "ran no test"
        case _:
            fault = f"pytest ended with {status}"
    return Outcome(suite, seconds, passed, failed, fault)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BUDGETS_S]
    if unknown:
        print(f"no such suite: {', '.join(unknown)}; there are {', '.join(BUDGETS_S)}", file=sys.stderr)
        return 2
    outcomes = []
    for suite in names or list(BUDGETS_S):
        budget_s = BUDGETS_S[suite]
        print(f"\n=== {suite} (within {budget_s} s) ===", flush=True)
        outcomes.append((lint if suite == "lint" else tests)(suite, PATIENCE * budget_s))
    print(f"\n{'suite':<14}{'passed':>8}{'failed':>8}{'seconds':>9}{'budget':>8}")
    for done in outcomes:
        line = f"{done.suite:<14}{done.passed:>8}{done.failed:>8}{done.seconds:>9.1f}{BUDGETS_S[done.suite]:>8}"
        is_late = done.seconds > BUDGETS_S[done.suite] and not done.fault
        print(f"{line}  {done.fault}{'over its budget' if is_late else ''}".rstrip())
    # A suite that failed as a whole (over budget, lint) counts as one failure, so that the last line never lies.
    failed = sum(max(done.failed, 1 if done.fault else 0) for done in outcomes)
    print(f"{sum(done.passed for done in outcomes)} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
