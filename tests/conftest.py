"""Rules for every suite: under CI=true nothing is skipped or expected to fail, in silence or otherwise.

A test that cannot run on the machine that checks the code checks nothing; whoever needs a skip must say so to a
person, not to a runner.

Tests compute small things on one thread, and threads that wait sleep: where other programs run too, those that spin
take the core from the one that they wait for. Libraries read these settings when they load, so they are made here.

What Hypothesis draws is the same in every run, and how long it takes to draw it is nobody's fault.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
settings.register_profile(
    "kilburn", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kilburn")

_set_aside: list[str] = []


def _note(nodeid: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped or hasattr(report, "wasxfail"):
        _set_aside.append(f"{nodeid} ({getattr(report, 'wasxfail', '') or report.longreprtext})")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report.nodeid, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report.nodeid, report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") == "true" and _set_aside:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") == "true" and _set_aside:
        terminalreporter.section("skipped or expected to fail, which CI does not allow")
        for line in _set_aside:
            terminalreporter.line(line)
