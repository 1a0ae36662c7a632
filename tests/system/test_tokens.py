"""The whole service against transformers: greedy tokens of the bundled model, in float32, by REST.

Every run asks for the same prompts of 1 to 700 tokens, and is cold where nothing else is said:

    one by one      each prompt alone on the machine
    twice           the same prompts again, together, over the blocks that the first pass left
    all at once     one batch
    narrow steps    64 token positions a step, so that prompts run in chunks beside decoding rows
    small pool      too few blocks for all, so that groups are preempted and computed anew

The reference is transformers' own model without any cache: an answer is its greedy one if each token is the best after
the prompt and the tokens before it. That takes one pass per answer, and equal answers are judged once. A token that is
not the best is the first difference: its gap to the best is printed, and must be a tie within TOLERANCE.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from tokenizers import Tokenizer

from kilburn.controller.text import read_folder
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.worker.prepare import prepare
from tests.system.serving import Service

TOLERANCE = 1e-4
MOST_DIFFERING = 0.01  # of the sequences of one run
NUM_NEW = 16
LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 15, 16, 17, 21, 26, 31, 32, 33, 40, 48, 63, 65, 80, 100, 130, 700)
FLAGS = ("--device=cpu", "--dtype=float32", "--threads=2", "--max-rows=32")
BEGINNINGS = (
    "Rivers carve valleys over thousands of years, and the stones that they carry become sand.",
    "My grandmother kept bees behind the house; on warm evenings we could hear them from the kitchen.",
    "To bake bread you need flour, water, salt and patience, in that order of price.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))\n",
    "The committee met on Tuesday. Nobody could say what it had decided.",
)


def prompt_of(tokenizer: Tokenizer, number: int, length: int) -> list[int]:
    """Exactly `length` ids. Each prompt begins with words of its own, so that no two share a block."""
    beginning = BEGINNINGS[number % len(BEGINNINGS)]
    words = beginning.split(" ")
    turned = " ".join(words[number // len(BEGINNINGS) :])
    ids = list(tokenizer.encode(f"{turned} {beginning} ").ids)
    return (ids * (length // len(ids) + 1))[:length]


@dataclass
class Reference:
    """transformers' model, and the answers that it has judged."""

    model: Any
    judged: dict[tuple[int, ...], float] = field(default_factory=dict)

    def gap(self, prompt: list[int], answer: list[int]) -> float:
        """By how much the first token that is not the best falls short of it; 0: all are the best."""
        key = (len(prompt), *prompt, *answer)
        if key not in self.judged:
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            with torch.inference_mode():
                logits = self.model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
            given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            short = (logits.amax(dim=1) - given).tolist()
            self.judged[key] = next((gap for gap in short if gap > 0), 0.0)
        return self.judged[key]


@dataclass(frozen=True)
class Asked:
    """Who asks, and who judges."""

    prompts: list[list[int]]
    ids_by_name: dict[str, int]
    reference: Reference

    def tokens(self, service: Service, prompts: list[list[int]]) -> list[list[int]]:
        """The answers to `prompts`, sent as one request."""
        body = {"prompt": prompts, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        done = httpx.post(f"{service.address}/v1/completions", json=body, timeout=120)
        assert done.status_code == 200, done.text
        choices = sorted(done.json()["choices"], key=lambda choice: choice["index"])
        return [[self.ids_by_name[name] for name in choice["logprobs"]["tokens"]] for choice in choices]

    def check(self, answers: list[list[int]]) -> None:
        assert [len(answer) for answer in answers] == [NUM_NEW] * len(self.prompts)
        gaps = [self.reference.gap(*asked) for asked in zip(self.prompts, answers, strict=True)]
        for prompt, gap in zip(self.prompts, gaps, strict=True):
            if gap > 0:
                print(f"the answer to {len(prompt)} tokens: the gap at the first difference is {gap:.2e}")
        assert max(gaps) <= TOLERANCE
        assert sum(gap > 0 for gap in gaps) <= MOST_DIFFERING * len(gaps)


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    from transformers import AutoModelForCausalLM

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads wait by spinning, which on a busy machine costs more than they bring

    folder = prepare(BUNDLED_NAME)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = read_folder(folder)
    names = [text.token_text(id) for id in range(tokenizer.get_vocab_size())]
    assert len(set(names)) == len(names), "the name of a token must tell its id"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = [prompt_of(tokenizer, number, length) for number, length in enumerate(LENGTHS)]
    yield Asked(prompts, {name: id for id, name in enumerate(names)}, Reference(model))
    torch.set_num_threads(num_threads)


@pytest.fixture
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    with Service(BUNDLED_NAME, tmp_path, *FLAGS, *request.param, ready_s=120) as service:
        yield service


def counted(service: Service, name: str) -> float:
    """A counter of /metrics, over all worker groups."""
    text = httpx.get(f"{service.address}/metrics", timeout=60).text
    found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"kilburn_{name}_total")]
    assert found, text
    return sum(map(float, found))


def test_the_prompts_are_what_they_should_be(asked: Asked) -> None:
    assert len(asked.prompts) >= 24
    assert (len(asked.prompts[0]), len(asked.prompts[-1])) == (1, 700)
    # Blocks of 16: with equal first ones, a cold run would not be cold.
    first_blocks = [tuple(prompt[:16]) for prompt in asked.prompts if len(prompt) >= 16]
    assert len(set(first_blocks)) == len(first_blocks)


def test_the_reference_notices_one_wrong_token(asked: Asked) -> None:
    prompt = asked.prompts[3]
    made: list[int] = []
    with torch.inference_mode():
        for _ in range(5):
            made.append(int(asked.reference.model(torch.tensor([prompt + made])).logits[0, -1].argmax()))
    assert asked.reference.gap(prompt, made) <= TOLERANCE
    for place in (0, 2, 4):
        wrong = [*made[:place], (made[place] + 1) % 1000, *made[place + 1 :]]
        assert asked.reference.gap(prompt, wrong) > 0.01


@pytest.mark.parametrize("serve", [()], ids=["one-by-one"], indirect=True)
def test_one_by_one_and_twice(serve: Service, asked: Asked) -> None:
    answers = [asked.tokens(serve, [prompt])[0] for prompt in asked.prompts]
    asked.check(answers)
    assert counted(serve, "prefix_hit_tokens") == 0
    asked.check(asked.tokens(serve, asked.prompts))
    assert counted(serve, "prefix_hit_tokens") >= 1000


# Where a step has a target, a slow machine computes prompts in smaller pieces.
@pytest.mark.parametrize("serve", [("--step-target-ms=0",)], ids=["all-at-once"], indirect=True)
def test_all_at_once(serve: Service, asked: Asked) -> None:
    asked.check(asked.tokens(serve, asked.prompts))
    assert counted(serve, "prefix_hit_tokens") == 0
    # One after the other they would take this for each prompt.
    assert counted(serve, "steps") < len(LENGTHS) / 4 * NUM_NEW, "they did not run together"


@pytest.mark.parametrize("serve", [("--max-step-tokens=64",)], ids=["narrow-steps"], indirect=True)
def test_steps_of_64_tokens(serve: Service, asked: Asked) -> None:
    asked.check(asked.tokens(serve, asked.prompts))
    assert counted(serve, "steps") > sum(LENGTHS) / 64


@pytest.mark.parametrize("serve", [("--num-blocks=48", "--max-len=760")], ids=["small-pool"], indirect=True)
def test_a_pool_so_small_that_groups_are_preempted(serve: Service, asked: Asked) -> None:
    asked.check(asked.tokens(serve, asked.prompts))
    assert counted(serve, "preemptions") > 0
