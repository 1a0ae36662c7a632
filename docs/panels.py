"""Prints what each panel of the dashboards means into docs/OPERATING.md, from the dashboards' own descriptions.

`python docs/panels.py` rewrites the part between its two marks; a test holds that it is current.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "OPERATING.md"
BEGIN, END = "<!-- panels -->\n", "<!-- end: panels -->"


def printed() -> str:
    """A section for each dashboard, a line for each panel."""
    lines: list[str] = []
    for file in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"**{board['title']}**", ""]
        lines += [
            f"- *{panel['title']}*: {panel['description']}" for panel in board["panels"] if panel.get("description")
        ]
        lines.append("")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The guide with its part about panels made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{printed()}{END}{after}"


if __name__ == "__main__":
    GUIDE.write_text(rendered(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
