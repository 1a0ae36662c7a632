"""Prints the state tables of the core as diagrams into docs/ARCHITECTURE.md, between their markers.

    python docs/diagrams.py

The tables are the truth; a test compares what stands in the document with what this prints.
"""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kilburn.controller.core import lease, sequence

DOCUMENT = Path(__file__).with_name("ARCHITECTURE.md")


def diagram(moves: Mapping[Any, Mapping[Any, str]]) -> str:
    """A mermaid state diagram of a table, state -> state -> why.

    The first state of the enum is where a life begins; one without moves ends it.
    """
    kind: type[Enum] = type(next(iter(moves)))
    states = list(kind)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {states[0].name}"]
    for now in states:
        lines += [f"    {now.name} --> {to.name}: {moves[now][to]}" for to in states if to in moves[now]]
        if not moves[now]:
            lines.append(f"    {now.name} --> [*]")
    return "\n".join([*lines, "```"])


DIAGRAMS: dict[str, Mapping[Any, Mapping[Any, str]]] = {"sequence": sequence.MOVES, "lease": lease.MOVES}


def rendered(text: str) -> str:
    """The document with every diagram as the tables have it now."""
    for name, moves in DIAGRAMS.items():
        begin, end = f"<!-- diagram: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{DOCUMENT.name}: no markers {begin.strip()} and {end} for the diagram of {name}")
        text = f"{before}{begin}{diagram(moves)}\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{DOCUMENT}: {', '.join(DIAGRAMS)} are current")
