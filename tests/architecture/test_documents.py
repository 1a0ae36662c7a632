"""Documents that are printed from the code are current."""

import re
import runpy

from tests.architecture.source import ROOT


def test_the_diagrams_are_those_of_the_state_tables() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    printed = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["rendered"](text)
    assert printed == text, "run: make docs"


def test_the_guide_says_what_each_panel_means_and_what_to_do_about_each_alert() -> None:
    text = (ROOT / "docs" / "OPERATING.md").read_text(encoding="utf-8")
    printed = runpy.run_path(str(ROOT / "docs" / "panels.py"))["rendered"](text)
    assert printed == text, "run: make docs"
    alerts = re.findall(r"alert: (\w+)", (ROOT / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert len(alerts) >= 6
    assert [alert for alert in alerts if f"### {alert}\n" not in text] == []
