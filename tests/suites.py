"""The whole suite: lint and each folder of tests, two at a time, each within a budget of seconds.

`python tests/suites.py [suite ...]`. Most suites keep one core busy, so they run in pairs, and what each said is
printed when it ends. A budget is what a suite may take on two cores that do nothing else but it and its neighbour. One
that is over it is named; at PATIENCE times its budget it is stopped and has failed, as has one that ran no test. The
last line sums up every pytest run: `N passed, N failed`.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

ROOT = Path(__file__).parent.parent

# Seconds; the longer of the two lanes is the promise of 25 minutes.
BUDGETS_S = {
    "lint": 35,
    "architecture": 50,
    "core": 45,
    "sim": 420,
    "wire": 90,
    "kernels": 215,
    "triton": 120,
    "worker": 230,
    "api": 140,
    "page": 70,
    "deaths": 340,
    "system": 580,
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


async def run(command: list[str], limit_s: float, said: IO[bytes] | None = None) -> tuple[int | None, float]:
    """Exit status (None: stopped at the limit) and seconds taken; its words go to `said`.

    What it started ends with it, and it ends with whoever waits for it.
    """
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, start_new_session=True, stdout=said, stderr=said)
    try:
        return await asyncio.wait_for(process.wait(), limit_s), time.monotonic() - begun
    except TimeoutError:
        taken_s = time.monotonic() - begun
        process.send_signal(signal.SIGINT)  # pytest then says where it was
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LAST_WORDS_S)
        return None, taken_s
    finally:
        with contextlib.suppress(ProcessLookupError):  # its whole session may have ended with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def lint(limit_s: float, said: IO[bytes] | None) -> Outcome:
    taken_s, faults = 0.0, []
    for tool, *words in LINT:
        status, seconds = await run([sys.executable, "-m", tool, *words], max(limit_s - taken_s, 0.1), said)
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


async def tests(suite: str, limit_s: float, said: IO[bytes] | None) -> Outcome:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", f"tests/{suite}", f"--junitxml={report}", "--durations=5", "-o", "junit_family=xunit2"]
        status, seconds = await run([sys.executable, "-m", "pytest", *words], limit_s, said)
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


async def outcome_of(suite: str, said: IO[bytes] | None = None) -> Outcome:
    limit_s = PATIENCE * BUDGETS_S[suite]
    return await (lint(limit_s, said) if suite == "lint" else tests(suite, limit_s, said))


async def lane(suites: list[str], outcomes: list[Outcome]) -> None:
    """Takes the next suite as long as there is one. It is silent while it runs, then printed in one piece."""
    while suites:
        suite = suites.pop(0)
        print(f"... {suite} began", flush=True)
        with TemporaryFile() as said:
            done = await outcome_of(suite, said)
            said.seek(0)
            words = said.read().decode(errors="replace")
        print(f"\n=== {suite} (within {BUDGETS_S[suite]} s) ===\n{words}", flush=True)
        outcomes.append(done)


def longest_s(budgets_s: dict[str, int]) -> float:
    """Seconds of the whole run if each suite takes all of its budget."""
    ends = [0, 0]
    for budget_s in sorted(budgets_s.values(), reverse=True):
        ends[ends.index(min(ends))] += budget_s
    return max(ends)


async def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BUDGETS_S]
    if unknown:
        print(f"no such suite: {', '.join(unknown)}; there are {', '.join(BUDGETS_S)}", file=sys.stderr)
        return 2
    if len(names) == 1:
        return told([await outcome_of(names[0])])
    # The longest first, so that neither lane is left alone with it.
    suites, outcomes = sorted(names or BUDGETS_S, key=lambda suite: -BUDGETS_S[suite]), list[Outcome]()
    async with asyncio.TaskGroup() as lanes:
        for _ in range(2):
            lanes.create_task(lane(suites, outcomes))
    return told(outcomes)


def told(outcomes: list[Outcome]) -> int:
    """Prints the table; the exit status."""
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
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
