"""How log lines look: for people, or one JSON object a line for machines.

    human   2026-01-31 12:00:00,123 kilburn INFO: lease 1 began
    json    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "kilburn", "message": "lease 1 began"}

Whoever logs may hand over fields of its own, `extra={"fields": {...}}`: they stand in the JSON object, and people are
spared them. Stdlib only: controller and worker share it.
"""

import json
import logging
from datetime import UTC, datetime

HUMAN = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object a line, whatever is in the message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= fields
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: str, form: str) -> None:
    """Log to stderr, at this level and in this form (human or json), from here on. Replaces what was set up before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(HUMAN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
