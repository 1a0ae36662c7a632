"""Documents that are printed from the code are current."""

import runpy

from tests.architecture.source import ROOT


def test_the_diagrams_are_those_of_the_state_tables() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    printed = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["rendered"](text)
    assert printed == text, "run: make docs"
