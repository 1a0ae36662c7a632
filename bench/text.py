"""Whether a streamed text is the whole text, letter by letter: for every cut, with stop strings anywhere in it.

    python bench/text.py --strings FILE.json              a JSON list of texts
    python bench/text.py --strings FILE.json --model DIR  with that folder's tokenizer beside two made on the spot

Each text becomes ids, and those an answer. What is let out is compared with the library's decoding of all ids at once,
cut where a reader who goes letter by letter would first see a stop string end. It is taken after every id, all at the
end, and, where the text is short, split at each place in turn. Stop strings are pieces of the text itself that lie over
the borders of its ids, inside characters that a reader sees as one, and at its end.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kilburn.controller.choice import Ask, Choice
from kilburn.controller.text import Text, read_folder
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason

SHORT = 48  # ids, up to which every split is tried
MOST_STOPS = 10  # of one text


def ids_of(text: Text, written: str) -> list[int]:
    ids: list[int] = text._plain.encode(written, add_special_tokens=False).ids
    return ids


def streamed(text: Text, ids: Sequence[int], ask: Ask, takes: Iterable[int]) -> tuple[str, FinishReason | None]:
    """What a reader gets who takes what there is after so many ids, and at the end."""
    choice, wanted = Choice(0, ask, text.detokenizer(ask.skip_special)), set(takes)
    out: list[str] = []
    for place, id in enumerate(ids):
        if choice.feed(id, ()):
            break
        if place + 1 in wanted:
            out.append(choice.take().text)
    if choice.finish is None:
        choice.end(FinishReason.LENGTH, "")
    last = choice.take()
    return "".join(out) + last.text, last.finish


def read_slowly(whole: str, stop: str, include: bool) -> tuple[str, FinishReason]:
    """Where the first stop string ends, letter by letter."""
    at = whole.find(stop) if stop else -1
    if at < 0:
        return whole, FinishReason.LENGTH
    return whole[: at + len(stop) * include], FinishReason.STOP


def stops_in(text: Text, ids: Sequence[int], whole: str) -> Iterator[str]:
    """Pieces of the text over the borders of its ids, and what it does not hold but seems to begin."""
    yield ""
    borders = [len(text.decode(ids[:i])) for i in range(1, len(ids))]
    for border in islice(borders, 0, None, max(1, len(borders) // MOST_STOPS)):
        for length in (1, 3):
            if piece := whole[max(border - length + 1, 0) : border + length - 1] or whole[border : border + 1]:
                yield piece
    yield whole[-2:]
    yield whole[-2:] + "\u2603"


def faults_of(text: Text, written: str) -> list[str]:
    """What is wrong with one text; nothing, it is hoped."""
    ids = ids_of(text, written)
    whole, faults = text.decode(ids, skip_special=True), []
    for stop in dict.fromkeys(stops_in(text, ids, whole)):
        for include in (False, True):
            ask = Ask([1], len(ids) + 1, Sampling(), stops=(stop,) if stop else (), include_stop=include)
            due = read_slowly(whole, stop, include)
            ways: list[Iterable[int]] = [range(len(ids) + 1), ()]
            if len(ids) <= SHORT:
                ways += [(at,) for at in range(1, len(ids))]
            for takes in ways:
                found = streamed(text, ids, ask, takes)
                if found != due:
                    faults.append(f"{written!r} stop {stop!r} include {include} taken at {takes}: {found}, not {due}")
    return faults


def main(words: list[str] | None = None) -> int:
    from tests.api.vocabularies import FAMILIES

    parser = argparse.ArgumentParser(description="Streamed texts against whole ones.")
    parser.add_argument("--strings", type=Path, required=True, help="a JSON list of texts")
    parser.add_argument("--model", type=Path, action="append", default=[], help="folder with a tokenizer.json")
    wanted = parser.parse_args(words)
    strings = json.loads(wanted.strings.read_text(encoding="utf-8"))
    if not (isinstance(strings, list) and all(isinstance(written, str) for written in strings)):
        parser.error(f"--strings {wanted.strings} is no JSON list of texts")
    texts = {kind: make() for kind, make in FAMILIES.items()} | {path.name: read_folder(path) for path in wanted.model}
    num_faults = 0
    for kind, text in texts.items():
        faults = [fault for written in strings for fault in faults_of(text, written)]
        print(f"{kind:<24}{len(strings):>6} texts{len(faults):>8} faults")
        for fault in faults[:5]:
            print(f"  {fault}")
        num_faults += len(faults)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
