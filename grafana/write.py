"""Writes dashboards/*.json from their descriptions: `python grafana/write.py`. A test holds that they agree."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from grafana.described import DASHBOARDS

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Each file's name and content."""
    return {f"{board.uid}.json": json.dumps(board.json(), indent=1) + "\n" for board in DASHBOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
