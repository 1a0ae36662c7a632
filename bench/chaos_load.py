"""What clients do while things break: the same few requests over and over, and what became of each.

Every body is asked once before anything breaks; what was answered then must be answered ever after, whole or streamed.
A stream that ends with an error must have been right as far as it went. Bodies are of few families with a long common
beginning each, so that prefixes are found, shared, lost and found again.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# Nobody may be left waiting for so long: a gateway tries three controllers, and each keeps a request for its
# --recovery-seconds, 60 here.
HUNG_S = 240.0
LEAVE_SHARE = 0.1  # of requests whose client goes away before the end
WORDS = "the paged memory of a server holds what was read and what was said in blocks that are shared until written"


@dataclass(frozen=True, slots=True)
class Finished:
    choices: dict[int, tuple[str, str]]  # by index: text, reason


@dataclass(frozen=True, slots=True)
class Refused:
    """With a reason; `so_far` is what a stream had said until then."""

    code: str
    so_far: dict[int, str]


@dataclass(frozen=True, slots=True)
class Wrong:
    """What must not happen."""

    what: str


Outcome = Finished | Refused | Wrong


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    sent: int = 0
    finished: int = 0
    left: int = 0  # their clients went away, as they meant to
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def adds_up(self) -> bool:
        return self.sent == self.finished + self.left + self.refused.total() + len(self.wrong)


def bodies(seed: int, num_kinds: int = 18) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each kind of request."""
    dice, words = random.Random(seed), WORDS.split()
    beginnings = [" ".join(dice.choices(words, k=24)) for _ in range(3)]
    found: list[tuple[str, dict[str, Any]]] = []
    for i in range(num_kinds):
        text = f"{beginnings[i % 3]} {' '.join(dice.choices(words, k=dice.randint(1, 24)))}"
        body: dict[str, Any] = {"max_tokens": dice.randint(4, 64), "ignore_eos": True, "temperature": 0.0}
        match i % 6:
            case 1 | 3:
                body |= {"temperature": 0.8, "seed": dice.randrange(1 << 30)}
            case 2:
                body |= {"temperature": 0.8, "seed": dice.randrange(1 << 30), "n": 3}
        if i % 6 == 5:
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append(("/v1/completions", body | {"prompt": text}))
    return found


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], is_stream: bool) -> Outcome:
    try:
        async with asyncio.timeout(HUNG_S), session.post(url + path, json=body | {"stream": is_stream}) as response:
            if response.content_type == "text/event-stream":
                return await _streamed(response)
            return _whole(response.status, await response.read())
    except TimeoutError:
        return Wrong(f"{path}: no end within {HUNG_S:g} s")
    except aiohttp.ClientError as error:
        return Wrong(f"{path}: {error!r}, and no word of why")


def _whole(status: int, raw: bytes) -> Outcome:
    try:
        said = json.loads(raw)
        if status == 200:
            return Finished({c["index"]: (_text(c, "message"), c["finish_reason"]) for c in said["choices"]})
        return Refused(str(said["error"]["code"]), {})
    except (ValueError, KeyError, TypeError):
        return Wrong(f"status {status} with {raw[:200]!r}")


def _text(choice: dict[str, Any], name: str) -> str:
    return str(choice["text"] if "text" in choice else choice[name].get("content") or "")


async def _streamed(response: aiohttp.ClientResponse) -> Outcome:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    code, is_done = "", False
    async for line in response.content:
        name, _, data = line.strip().partition(b": ")
        if name != b"data":
            continue  # an empty line, or a comment that keeps the connection alive
        if data == b"[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            code = str(event["error"]["code"])
        for choice in event.get("choices", ()):
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text(choice, "delta")
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    if not is_done:
        return Wrong("a stream that ended without [DONE]")
    if code:
        return Refused(code, texts)
    return Finished({index: (text, reasons.get(index, "")) for index, text in texts.items()})


class Load:
    """Clients that go on until told to stop."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session, self._url, self._seed = session, url, seed
        self._bodies = bodies(seed)
        self._expected: list[Finished] = []
        self.tally = Tally()
        self.is_over = False

    async def rehearse(self) -> None:
        """Every request once, undisturbed. Raises SystemExit where that fails already."""
        for path, body in self._bodies:
            match await ask(self._session, self._url, path, body, is_stream=False):
                case Finished() as answer:
                    self._expected.append(answer)
                case other:
                    raise SystemExit(f"before anything was broken: {other}")

    async def run(self, num_clients: int) -> None:
        await asyncio.gather(*(self._client(number) for number in range(num_clients)))

    async def _client(self, number: int) -> None:
        dice = random.Random(f"{self._seed} client {number}")
        while not self.is_over:
            kind, is_stream = dice.randrange(len(self._bodies)), dice.random() < 0.6
            leaves_after_s = dice.uniform(0.0, 0.5) if dice.random() < LEAVE_SHARE else None
            self.tally.sent += 1
            asking = asyncio.create_task(ask(self._session, self._url, *self._bodies[kind], is_stream))
            done, _ = await asyncio.wait({asking}, timeout=leaves_after_s)
            if not done:
                asking.cancel()
                await asyncio.wait({asking})
                self.tally.left += 1
                continue
            self._note(kind, asking.result())
            if isinstance(asking.result(), Refused):
                await asyncio.sleep(dice.uniform(0.05, 0.3))  # as a client would that means to try again

    def _note(self, kind: int, outcome: Outcome) -> None:
        expected, tally = self._expected[kind].choices, self.tally
        match outcome:
            case Finished(choices) if choices == expected:
                tally.finished += 1
            case Finished(choices):
                tally.wrong.append(f"kind {kind}: {_difference(choices, expected)}")
            case Refused(code, so_far) if all(expected[i][0].startswith(text) for i, text in so_far.items()):
                tally.refused[code] += 1
            case Refused(code, so_far):
                tally.wrong.append(f"kind {kind}: before {code} it said {so_far!r}, not {expected!r}")
            case Wrong(what):
                tally.wrong.append(f"kind {kind}: {what}")


def _difference(ours: dict[int, tuple[str, str]], theirs: dict[int, tuple[str, str]]) -> str:
    index: Sequence[int] = [i for i in {**ours, **theirs} if ours.get(i) != theirs.get(i)]
    return f"choice {index[0]}: {ours.get(index[0])!r}, not {theirs.get(index[0])!r}"
