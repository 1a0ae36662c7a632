"""Answers follow their grammar, whoever is beside them and however often they move; stop ids come where it ends."""

import json
import re
from dataclasses import replace
from pathlib import Path
from queue import Queue
from threading import Event

import numpy as np
import pytest

from kilburn.controller.core.events import Submit
from kilburn.controller.core.policy import Preemption
from kilburn.controller.grammar_check import checked
from kilburn.shared.grammar import Grammar
from kilburn.shared.messages import Forget, Prepare, Prepared, Unpreparable
from kilburn.shared.sampling import Draws, Sampling
from kilburn.worker.grammars import BYTES_EACH, Grammars
from kilburn.worker.outcomes import PlanBroken
from tests.worker.served import Served
from tests.worker.toy import VOCAB, Hand, ToyModel, admit, toy_executor

SIGNS = '{}[]":, .-abcdefghijklmnopqrstuvwxyz0123456789'
END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar.of(json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
WORD = Grammar.of("start: /[a-c]{2,6}/")
FIXED = Grammar.of('start: "ab" | "abc"')


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many tokens as the toy model has: an end, single letters, and fillers that no grammar wants."""
    byte_level = {" ": "\u0120"}
    words = ["<end>", *[byte_level.get(sign, sign) for sign in SIGNS]]
    words += [chr(0x100 + i) for i in range(VOCAB - len(words))]  # bytes 0, 1, ...
    added = {"id": END, "content": "<end>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    about = {
        "version": "1.0",
        "added_tokens": [added],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }
    file = tmp_path_factory.mktemp("toy") / "tokenizer.json"
    file.write_text(json.dumps(about))
    return file


def text_of(tokens: list[int]) -> str:
    return "".join(SIGNS[token - 1] for token in tokens if token != END)


def bound(grammar: Grammar, number: int = 0, **fields: object) -> Submit:
    sampling = Sampling(temperature=1.0, seed=number, stop_ids=(END,), grammar=grammar.digest)
    prompt = tuple((7 * i + number) % VOCAB for i in range(10))
    knobs = {name: fields.pop(name) for name in list(fields) if name in Sampling.__dataclass_fields__}
    return Submit(number, prompt, 60, replace(sampling, **knobs), grammar=grammar, **fields)


def served(tokenizer: Path, **about: object) -> Served:
    return Served(
        ToyModel(1), **({"num_blocks": 200, "num_host_blocks": 0} | about), grammars=Grammars(tokenizer, VOCAB)
    )


def test_what_ends_is_what_the_grammar_means(tokenizer: Path) -> None:
    submits = [bound(JSON, 1), bound(JSON, 2, temperature=0.0), bound(JSON, 3, n=4), bound(WORD, 4, top_k=3)]
    submits += [bound(WORD, 5, repetition_penalty=1.3, logit_bias=((END, 50.0),)), bound(FIXED, 6, min_p=0.1)]
    answers = served(tokenizer).answers([*submits, Submit(9, (3, 4), 20, Sampling(seed=9))])
    num_ended = 0
    unbound = served(tokenizer).answers([Submit(9, (3, 4), 20, Sampling(seed=9))])
    assert answers.pop((9, 0)) == unbound[9, 0]
    for (number, _), answer in answers.items():
        text = text_of(answer.tokens)
        match number:
            case 1 | 2 | 3 if answer.reason == "stop":
                read = json.loads(text)
                assert set(read) == {"name", "ages"}
                assert all(isinstance(age, int) for age in read["ages"])
                num_ended += 1
            case 1 | 2 | 3:
                assert len(answer.tokens) == 60
            case 4 | 5:
                assert re.fullmatch("[a-c]{2,6}", text), text
                assert answer.reason == "stop"
            case 6:
                assert text in ("ab", "abc")
    assert num_ended >= 2


@pytest.mark.parametrize("way", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_who_was_moved_goes_on_in_its_grammar(tokenizer: Path, way: Preemption) -> None:
    submits = [bound(JSON, number, n=1 + number % 2, presence_penalty=0.3 * (number % 2)) for number in range(6)]
    pressed = served(tokenizer, num_blocks=40, num_host_blocks=40 * (way is Preemption.SWAP), preemption=way)
    assert pressed.answers(submits) == served(tokenizer).answers(submits)
    found = pressed.snapshot
    assert (found.preempted_by_swap if way is Preemption.SWAP else found.preempted_by_recompute) >= 1


def test_the_end_of_a_grammar_wins_over_min_tokens(tokenizer: Path) -> None:
    answers = served(tokenizer).answers([bound(FIXED, 1, min_tokens=50), bound(WORD, 2, min_tokens=5)])
    assert text_of(answers[1, 0].tokens) == "abc"  # it may not end before, and cannot go on after
    assert len(text_of(answers[2, 0].tokens)) >= 5
    assert {answer.reason for answer in answers.values()} == {"stop"}


def test_another_stop_id_comes_only_where_the_grammar_ends(tokenizer: Path) -> None:
    letter = 1 + SIGNS.index("b")
    answers = served(tokenizer).answers([bound(FIXED, n, stop_ids=(END, letter), temperature=2.0) for n in range(8)])
    for answer in answers.values():  # "b" is text until the grammar may end, and cannot be then
        assert text_of(answer.tokens)[:1] == "a"
        assert answer.reason in ("stop", "error")


def test_a_row_of_a_grammar_that_is_not_here_breaks_its_plan(tokenizer: Path) -> None:
    executor = toy_executor(ToyModel(1), grammars=Grammars(tokenizer, VOCAB))
    row = admit(0, [1, 2], [0], bound(WORD).sampling)
    with pytest.raises(PlanBroken, match="not prepared"):
        Hand(executor).run({0: 2}, (row,))
    asked, answers = Prepare(7, 1, WORD.digest, WORD.source), Queue()
    executor.prepare(asked, answers.put)
    assert answers.get(timeout=60) == Prepared(7, 1)
    executor.prepare(replace(asked, number=2), answers.put)
    assert answers.get(timeout=60) == Prepared(7, 2)
    Hand(executor).run({0: 2}, (row,))
    executor.forget(Forget(7, WORD.digest))
    with pytest.raises(PlanBroken, match="not prepared"):
        Hand(executor).run({0: 2}, (row,))
    bare = toy_executor(ToyModel(1))
    with pytest.raises(PlanBroken, match="nothing here"):
        Hand(bare).run({0: 2}, (row,))


def test_steps_go_on_while_a_grammar_is_compiled(tokenizer: Path) -> None:
    executor, answers = toy_executor(ToyModel(1), grammars=Grammars(tokenizer, VOCAB)), Queue()
    executor.prepare(Prepare(7, 1, WORD.digest, WORD.source), answers.put)
    answers.get(timeout=60)
    compiling, goes_on = Event(), Event()

    def answer(_: object) -> None:  # on the compiler's thread, which gets no further
        compiling.set()
        goes_on.wait(60)

    executor.prepare(Prepare(7, 2, JSON.digest, JSON.source), answer)
    assert compiling.wait(60)
    result = Hand(executor).run({0: 2}, (admit(0, [1, 2], [0], bound(WORD).sampling),))
    assert (result.num_tokens, result.failed) == ([1], {})
    assert not goes_on.is_set()
    goes_on.set()


def test_one_row_that_left_its_grammar_fails_alone(tokenizer: Path) -> None:
    """Its history says what its grammar forbids."""
    executor, answers = toy_executor(ToyModel(1), grammars=Grammars(tokenizer, VOCAB)), Queue()
    executor.prepare(Prepare(7, 1, WORD.digest, WORD.source), answers.put)
    answers.get(timeout=60)
    sampling = bound(WORD).sampling
    lost = admit(0, [1, 2, 1 + SIGNS.index("z")], [0], sampling, num_prompt=2)
    sound = admit(1, [1, 2, 1 + SIGNS.index("a")], [1], replace(sampling, choose=Draws(0, 1)), num_prompt=2)
    result = Hand(executor).run({0: 3, 1: 3}, (lost, sound))
    assert list(result.failed) == [0]
    assert "grammar" in result.failed[0]
    assert result.num_tokens == [0, 1]


@pytest.mark.parametrize(
    ("source", "reason"),
    [("start: /(a/", "regex"), ('{"grammars":[{"json_schema":{"not":{}}}]}', "not"), ("nonsense", "")],
)
def test_what_cannot_be_compiled_is_said(tokenizer: Path, source: str, reason: str) -> None:
    answers, grammar = Queue(), Grammar.of(source)
    Grammars(tokenizer, VOCAB).prepare(Prepare(7, 3, grammar.digest, grammar.source), answers.put)
    answer = answers.get(timeout=60)
    assert isinstance(answer, Unpreparable)
    assert answer.number == 3
    assert reason in answer.reason


def test_a_model_without_a_tokenizer_follows_none(tmp_path: Path) -> None:
    answers = Queue()
    Grammars(tmp_path / "tokenizer.json", VOCAB).prepare(Prepare(7, 1, WORD.digest, WORD.source), answers.put)
    assert "tokenizer.json" in answers.get(timeout=60).reason


def test_what_is_forgotten_is_kept_within_bounds(tokenizer: Path) -> None:
    grammars, answers = Grammars(tokenizer, VOCAB, most_kept_bytes=5 * BYTES_EACH), Queue()
    made = [Grammar.of(f'start: "a{i}"') for i in range(40)]
    for number, grammar in enumerate(made):
        grammars.prepare(Prepare(7, number, grammar.digest, grammar.source), answers.put)
        assert answers.get(timeout=60) == Prepared(7, number)
        if number != 3:
            grammars.forget(Forget(7, grammar.digest))
        assert grammars.num_bytes <= 6 * BYTES_EACH
    grammars.compiled(made[3].digest)  # it is wanted, and nothing makes it go
    grammars.clear()
    with pytest.raises(PlanBroken):
        grammars.compiled(made[3].digest)


def test_many_masks_at_once_are_those_of_each_alone(tokenizer: Path) -> None:
    grammars, answers = Grammars(tokenizer, VOCAB), Queue()
    bounds = []
    for number, grammar in enumerate([JSON, WORD, FIXED] * 4):
        grammars.prepare(Prepare(7, number, grammar.digest, grammar.source), answers.put)
        answers.get(timeout=60)
        generated = [1 + SIGNS.index("a")] if grammar is not JSON else [1]
        bounds.append(grammars.compiled(grammar.digest).at(generated * (number % 2), [END]))
    together = grammars.masks(bounds).allowed
    assert np.array_equal(together, np.concatenate([grammars.masks([one]).allowed for one in bounds]))
    assert together.any(axis=1).all()


INSTANCES = [
    ({"enum": ["yes", "no", 3, None]}, "no"),
    ({"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 4}, [1, None, -20]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, {"a": True, "b-c": False}),
    ({"anyOf": [{"type": "number", "minimum": 5}, {"type": "string", "pattern": "^[a-c]{2}$"}]}, "ab"),
    (
        {"$defs": {"tree": {"properties": {"kids": {"items": {"$ref": "#/$defs/tree"}}}}}, "$ref": "#/$defs/tree"},
        {"kids": [{"kids": []}, {}]},
    ),
    ({"type": "string", "format": "date"}, "2024-02-29"),
    ({"properties": {"a": {"const": {"b": [1, 2]}}}, "required": ["a"]}, {"a": {"b": [1, 2]}, "z": "more"}),
]


@pytest.mark.parametrize(("schema", "instance"), INSTANCES)
def test_masks_admit_a_valid_instance_token_by_token(tokenizer: Path, schema: dict, instance: object) -> None:
    grammar, answers = Grammar.of(checked({"kind": "json_schema", "schema": schema})["source"]), Queue()
    grammars = Grammars(tokenizer, VOCAB)
    grammars.prepare(Prepare(7, 1, grammar.digest, grammar.source), answers.put)
    assert answers.get(timeout=60) == Prepared(7, 1)
    row = grammars.compiled(grammar.digest).at([], [END])
    for sign in json.dumps(instance):
        token = 1 + SIGNS.index(sign)
        assert grammars.masks([row]).allowed[0, token], sign
        row.follow(token)
    assert grammars.masks([row]).allowed[0, END]
