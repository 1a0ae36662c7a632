"""The join of what comes out is the decoded whole, whatever the ids and however they are cut."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.controller.detokenize import StopStrings
from kilburn.controller.text import Text
from tests.api.vocabularies import FAMILIES

family = pytest.mark.parametrize("kind", FAMILIES)


@cache
def text_of(kind: str) -> Text:
    return FAMILIES[kind]()


def ids_of(text: Text, written: str) -> list[int]:
    ids: list[int] = text._plain.encode(written, add_special_tokens=False).ids
    return ids


def pieces(text: Text, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = text.detokenizer(skip_special)
    return [*(detokenizer.step(id) for id in ids), detokenizer.flush()]


@family
@pytest.mark.parametrize(
    "written",
    [
        " leading x. It is",
        "a  b",
        ". It",
        "\U0001f600",
        "漢字かな",
        "ď",
        "e\u0301",
        "\U0001f468\u200d\U0001f469",
        "  ",
        "\n\n x",
    ],
)
def test_pieces_join_to_the_whole(kind: str, written: str) -> None:
    text = text_of(kind)
    ids = ids_of(text, written)
    out = pieces(text, ids)
    assert "".join(out) == text.decode(ids, skip_special=True)
    assert out[-1] == "", "nothing was held back at the end of whole characters"
    assert not any("\ufffd" in piece for piece in out)


@family
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    text = text_of(kind)
    ids = data.draw(st.lists(st.integers(0, text.vocab_size + 3), max_size=60))
    skip_special = data.draw(st.booleans())
    joined, whole = "".join(pieces(text, ids, skip_special)), text.decode(ids, skip_special)
    if kind == "byte level" or "\ufffd" not in whole:
        assert joined == whole
    else:
        # Good bytes that share a run with bad ones: the library replaces them all, we the bad ones only.
        assert "\ufffd" in joined
        assert [c for c in whole if c != "\ufffd"] == [c for c in whole if c in joined and c != "\ufffd"]


def test_a_bad_byte_does_not_take_back_the_character_before_it() -> None:
    text = text_of("sentencepiece")
    good, bad = ids_of(text, "\U0001f600")[-4:], text._plain.token_to_id("<0xE0>")
    assert pieces(text, [*good, bad, *ids_of(text, "x")[-1:]]) == ["", "", "", "\U0001f600", "", "\ufffdx", ""]


@family
def test_bad_bytes_give_one_replacement_each_and_do_not_hold_the_stream(kind: str) -> None:
    text = text_of(kind)
    half = ids_of(text, "\U0001f600")[-4:][:2]
    letter = ids_of(text, "x")[-1:]
    middle = [*half, *letter]
    assert "".join(pieces(text, middle)).count("\ufffd") == text.decode(middle).count("\ufffd") >= 1
    ended = pieces(text, [*letter, *half])
    assert ended[:-1] == ["x", "", ""]
    assert ended[-1] == text.decode([*letter, *half])[1:]
    assert set(ended[-1]) == {"\ufffd"}
    endless = half[:1] * 500
    out = pieces(text, endless)
    assert "".join(out) == text.decode(endless)
    assert max(map(len, out)) < 40, "bad bytes were let go as they came"


def test_endless_hidden_tokens_cost_the_same_each() -> None:
    text = text_of("byte level")
    detokenizer = text.detokenizer()
    hidden = [0] * 1000
    assert {detokenizer.step(id) for id in hidden} == {""}
    assert len(detokenizer._pending) < 20
    assert detokenizer.step(ids_of(text, "x")[0]) == "x"


STOPS = [
    # pieces, stops, include, what is sent, whether it stopped
    (["DEF", "G", "HI", "J"], ["EFGHI"], False, "D", True),
    (["DEF", "G", "HI", "J"], ["EFGHI"], True, "DEFGHI", True),
    (["DEF", "G", "HX", "J"], ["EFGHI"], False, "DEFGHXJ", False),
    (["a", "a", "b"], ["ab"], False, "a", True),
    (["aaab"], ["aab"], False, "a", True),
    (["x\n", "\ny"], ["\n\n"], False, "x", True),
    (["abc"], ["b", "abc"], False, "a", True),  # the first to be complete wins
    (["abc"], ["bc", "abc"], False, "", True),  # and of two that end together the longer
    (["", "", ""], ["x"], False, "", False),
    (["no", "thing"], [], False, "nothing", False),
    (["EFG"], ["EFGHI"], False, "EFG", False),  # the end came first: what was held is text
]


@pytest.mark.parametrize(("given_pieces", "stops", "include", "sent", "stopped"), STOPS)
def test_stop_strings(given_pieces: list[str], stops: list[str], include: bool, sent: str, stopped: bool) -> None:
    assert through(StopStrings(stops, include), given_pieces) == (sent, stopped)


def through(scanner: StopStrings, given_pieces: list[str]) -> tuple[str, bool]:
    out = ""
    for piece in given_pieces:
        text, done = scanner.feed(piece)
        out += text
        if done:
            return out, True
    return out + scanner.flush(), False


def naive(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Letter by letter over the whole text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 24), max_size=6),
)
def test_stop_strings_equal_the_naive_reading_for_every_cut(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    cut_up = [text[start:end] for start, end in pairwise(edges)]
    assert through(StopStrings(stops, include), cut_up) == naive(text, stops, include)
