"""The whole service under memory pressure says what it says without: by REST, streamed and whole, by either way.

A tiny model behind a pool that holds all requests, and behind one that does not. The small one must really preempt, and
every client must get the same texts, log probabilities, reasons and counts.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.system.serving import TINY_FLAGS, Service
from tests.worker.tiny_models import make_tiny

WORDS = ("sea", "hand", "state", "moon", "thing", "reason", "bread", "edge", "river", "stone")
COMMON: dict[str, Any] = {"max_tokens": 44, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "drawn": {"temperature": 0.9, "seed": 11, "n": 2},
    "penalties": {"temperature": 0.8, "seed": 12, "presence_penalty": 0.7, "frequency_penalty": 0.5, "logprobs": 1},
    "repetition": {"temperature": 1.0, "seed": 13, "repetition_penalty": 1.4, "top_p": 0.9, "top_k": 40},
    "min_tokens": {"temperature": 1.0, "seed": 14, "min_tokens": 30, "ignore_eos": False},
    "stop strings": {"temperature": 1.1, "seed": 15, "stop": ["e", " qu", "zz"], "n": 3},
    "three with logprobs": {"temperature": 1.2, "seed": 16, "n": 3, "logprobs": 3},
    "beams": {"temperature": 0, "use_beam_search": True, "beam_width": 3, "n": 2},
}


def bodies() -> list[dict[str, Any]]:
    """Each kind twice: whole, and (but for beams, which have no text before their end) streamed."""
    found = []
    for number, (kind, fields) in enumerate(KINDS.items()):
        prompt = f"The {WORDS[number]} of the {WORDS[-1 - number]} and the {WORDS[number]} again"
        body = {**COMMON, **fields, "prompt": prompt}
        found.append(body)
        if kind != "beams":
            found.append({**body, "stream": True, "stream_options": {"include_usage": True}})
    return found


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer without what names it: texts, reasons and log probabilities by index, and the usage."""
    if not body.get("stream"):
        done = await client.post(url, json=body)
        assert done.status_code == 200, done.text
        answer = done.json()
        return {"choices": {c["index"]: plain(c) for c in answer["choices"]}, "usage": counts(answer["usage"])}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    async with client.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                add(choices.setdefault(choice["index"], {"text": "", "reason": None, "logprobs": None}), plain(choice))
    assert usage is not None
    return {"choices": choices, "usage": counts(usage)}


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    found = choice.get("logprobs")
    logprobs = None if not found else list(zip(found["tokens"], found["token_logprobs"], strict=True))
    return {"text": choice["text"], "reason": choice["finish_reason"], "logprobs": logprobs}


def add(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    whole["text"] += piece["text"]
    whole["reason"] = piece["reason"] or whole["reason"]
    if piece["logprobs"] is not None:
        whole["logprobs"] = (whole["logprobs"] or []) + piece["logprobs"]


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def all_answers(service: Service) -> list[dict[str, Any]]:
    async def play() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=120) as client:
            url = f"{service.address}/v1/completions"
            return list(await asyncio.gather(*(ask(client, url, body) for body in bodies())))

    return asyncio.run(play())


def metric(service: Service, name: str, **labels: str) -> float:
    text = httpx.get(f"{service.address}/metrics", timeout=60).text
    lines = [
        line for line in text.splitlines() if line.startswith((f"kilburn_{name}_total ", f"kilburn_{name}_total{{"))
    ]
    assert lines, f"no {name} in\n{text}"
    wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with Service(str(tiny), tmp_path_factory.mktemp("large"), *TINY_FLAGS) as service:
        answers = all_answers(service)
        assert metric(service, "preemptions") == 0
    return answers


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_clients_notice_nothing_of_preemption(
    way: str, undisturbed: list[dict[str, Any]], tiny: Path, tmp_path: Path
) -> None:
    small = [flag for flag in TINY_FLAGS if not flag.startswith("--num-blocks")]
    flags = (*small, "--num-blocks=60", "--block-size=4", "--max-len=200", f"--preemption={way}")
    with Service(str(tiny), tmp_path, *flags, "--host-pool=8MiB", "--verify-swap") as service:
        answers = all_answers(service)
        assert metric(service, "preemptions", mode=way) >= 3
        assert metric(service, "preemptions_returned", mode=way) >= 3
        if way == "swap":
            assert metric(service, "swap_bytes", direction="in") > metric(service, "host_hit_bytes") >= 0
            assert metric(service, "swap_bytes", direction="out") > metric(service, "host_saved_bytes") >= 0
    for body, answer, expected in zip(bodies(), answers, undisturbed, strict=True):
        assert answer["usage"] == expected["usage"], body
        assert answer["choices"].keys() == expected["choices"].keys()
        for index, choice in answer["choices"].items():
            theirs = expected["choices"][index]
            assert (choice["text"], choice["reason"]) == (theirs["text"], theirs["reason"]), (body, index)
            assert_alike(choice["logprobs"], theirs["logprobs"])


def assert_alike(ours: list[tuple[str, float]] | None, theirs: list[tuple[str, float]] | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-4)


def test_streamed_and_whole_are_the_same_answer(undisturbed: list[dict[str, Any]]) -> None:
    """Each kind was asked twice in the same words."""
    for number in range(0, len(undisturbed) - 1, 2):
        one, other = undisturbed[number], undisturbed[number + 1]
        assert {i: c["text"] for i, c in one["choices"].items()} == {i: c["text"] for i, c in other["choices"].items()}
        assert one["usage"] == other["usage"]
