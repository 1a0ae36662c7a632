"""How answers look: OpenAI's completions and chat completions, whole and in chunks.

A chunk is put together from text that was made ready once per answer, since it is made once per token:

    {"id": ..., "created": ..., "model": ..., "choices": [{"index":        0, "text": "..."  , "finish_reason": null}]}
    '----------------------- head -----------------------'        '- per delta -'           '-------- tail ---------'

Log probabilities have two layouts. Completions: four parallel lists. Chat: one object a token, with its bytes.
What this file does not know: where deltas come from, how they are sent.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from kilburn.controller.answer import Answer
from kilburn.controller.api.called import Calls
from kilburn.controller.api.errors import ApiError, encoded
from kilburn.controller.api.sse import DONE, frame
from kilburn.controller.calls.reading import CallReader
from kilburn.controller.choice import Delta, Scored
from kilburn.controller.text import Text
from kilburn.shared.types import FinishReason

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
quoted = json.encoder.encode_basestring  # of a text the same as to_json, without its detours

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI writes this
# OpenAI has no word for a request whose time ran out; its answer is as short as one at its length.
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "length"}


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer tells beside its text. `echoed` and `prompt`: how many of the likeliest tokens; -1: nothing."""

    usage: bool = False  # at the end of a stream; otherwise always
    logprobs: bool = False
    echoed: int = -1  # of the prompt, in one list with those of the answer
    prompt: int = -1  # of the prompt, as vLLM tells it
    timings: bool = False


class Layout(Protocol):
    """One answer's form."""

    @property
    def id(self) -> str: ...

    def whole(self, answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]: ...

    # Streamed, as whole events, any number of them in one text:

    def opening(self, answer: Answer) -> str:
        """Before any text."""

    def chunks(self, delta: Delta) -> str: ...

    def ending(self, answer: Answer) -> str:
        """Behind the last text."""

    def broken(self, error: ApiError) -> str:
        """In place of an ending."""


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


class _Head:
    """What every form of one answer begins with."""

    def __init__(self, prefix: str, kind: str, model: str, shown: Shown) -> None:
        self.id = f"{prefix}-{uuid4().hex}"
        self.fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._shown = shown
        self._begin = "data: " + to_json(self.fields)[:-1] + ',"choices":['
        self._tail = ('}],"usage":null}' if shown.usage else "}]}") + "\n\n"

    def chunk(self, index: int, body: str) -> str:
        """An event that says this of that choice."""
        return f'{self._begin}{{"index":{index},{body}{self._tail}'

    def ending(self, answer: Answer) -> str:
        if not (self._shown.usage or self._shown.timings):
            return DONE
        told = {"usage": usage(answer)} if self._shown.usage else {}
        return f"{self._begin}],{to_json({**told, **self.timings(answer)})[1:]}\n\n" + DONE

    def timings(self, answer: Answer) -> dict[str, Any]:
        return {"timings": answer.timings.as_data()} if self._shown.timings else {}

    def broken(self, error: ApiError) -> str:
        return frame(encoded(error)) + DONE


class CompletionLayout:
    def __init__(self, text: Text, model: str, shown: Shown) -> None:
        self._text, self._shown = text, shown
        self._head = _Head("cmpl", "text_completion", model, shown)

    @property
    def id(self) -> str:
        return self._head.id

    def whole(self, answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                "text": delta.text,
                "logprobs": self._logprobs(delta) if self._shown.logprobs else None,
                "finish_reason": _finish(delta),
                **_scores(delta),
                **_prompt_logprobs(delta, self._shown, self._text),
            }
            for delta in deltas
        ]
        about = {"choices": choices, "usage": usage(answer), **self._head.timings(answer)}
        return {**self._head.fields, **about}

    def opening(self, answer: Answer) -> str:
        return ""

    def chunks(self, delta: Delta) -> str:
        told = ""
        if delta.text or delta.scored or delta.prompt:
            logprobs = to_json(self._logprobs(delta)) if self._shown.logprobs else "null"
            body = f'"text":{quoted(delta.text)},"logprobs":{logprobs},"finish_reason":null'
            told = self._head.chunk(delta.index, body)
        if delta.finish is not None:
            body = f'"text":"","logprobs":null,"finish_reason":{to_json(_finish(delta))}{_why(delta)}'
            told += self._head.chunk(delta.index, body)
        return told

    def ending(self, answer: Answer) -> str:
        return self._head.ending(answer)

    def broken(self, error: ApiError) -> str:
        return self._head.broken(error)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        name, scored = self._text.token_text, delta.scored
        told: dict[str, list[Any]] = {
            "tokens": [name(s.id) for s in scored],
            "token_logprobs": [max(s.logprob, LEAST_LOGPROB) for s in scored],
            "top_logprobs": [self._likeliest(s.likeliest, s.id, s.logprob) for s in scored],
            "text_offset": [s.start for s in scored],
        }
        if delta.prompt is None or self._shown.echoed < 0:
            return told
        entries = list(delta.prompt)
        echoed: dict[str, list[Any]] = {
            "tokens": [name(id) for id in delta.prompt.prompt],
            "token_logprobs": [None, *(max(logprob, LEAST_LOGPROB) for _, logprob, _, _ in entries)],
            "top_logprobs": [
                None,
                *(self._likeliest(best[: self._shown.echoed], id, logprob) for id, logprob, _, best in entries),
            ],
            "text_offset": list(delta.prompt.starts),
        }
        return {key: echoed[key] + told[key] for key in told}

    def _likeliest(self, best: Iterable[tuple[int, float]], own: int, own_logprob: float) -> dict[str, float]:
        name = self._text.token_text
        return {name(id): max(logprob, LEAST_LOGPROB) for id, logprob in (*best, (own, own_logprob))}


class ChatLayout:
    """`reader`: makes a reader of the calls of tools for a choice; None: there are none to read."""

    def __init__(self, text: Text, model: str, shown: Shown, reader: Callable[[], CallReader] | None = None) -> None:
        self._text, self._shown = text, shown
        self._new_reader, self._calls = reader, dict[int, Calls]()
        self._head = _Head("chatcmpl", "chat.completion.chunk", model, shown)

    @property
    def id(self) -> str:
        return self._head.id

    def whole(self, answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                "message": self._message(delta),
                "logprobs": self._logprobs(delta.scored) if self._shown.logprobs else None,
                "finish_reason": self._finish(delta),
                **_scores(delta),
            }
            for delta in deltas
        ]
        fields = {**self._head.fields, "object": "chat.completion"}
        scores = _prompt_logprobs(deltas[0], self._shown, self._text)
        return {**fields, "choices": choices, "usage": usage(answer), **scores, **self._head.timings(answer)}

    def _message(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if self._new_reader is None:
            return message
        calls = self._calls[delta.index] = Calls(self._new_reader())
        return message | calls.whole(delta.text)

    def _finish(self, delta: Delta) -> str | None:
        calls = self._calls.get(delta.index)
        has_called = calls is not None and calls.has_any and delta.finish is FinishReason.STOP
        return "tool_calls" if has_called else _finish(delta)

    def _said(self, delta: Delta) -> list[str]:
        """What the `delta` of one chunk after the other says: text, and calls where they are read."""
        if self._new_reader is None:
            return [f'{{"content":{quoted(delta.text)}}}']
        if delta.index not in self._calls:
            self._calls[delta.index] = Calls(self._new_reader())
        deltas = self._calls[delta.index].deltas(delta.text, delta.finish is not None)
        return [to_json(said) for said in deltas] or (['{"content":""}'] if delta.scored else [])

    def opening(self, answer: Answer) -> str:
        body = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join([self._head.chunk(index, body) for index in range(len(answer.choices))])

    def chunks(self, delta: Delta) -> str:
        told = ""
        if delta.text or delta.scored or self._new_reader is not None:
            logprobs = to_json(self._logprobs(delta.scored)) if self._shown.logprobs else "null"
            for said in self._said(delta):
                told += self._head.chunk(delta.index, f'"delta":{said},"logprobs":{logprobs},"finish_reason":null')
                logprobs = "null"  # they are told once
        if delta.finish is not None:
            body = f'"delta":{{}},"logprobs":null,"finish_reason":{to_json(self._finish(delta))}{_why(delta)}'
            told += self._head.chunk(delta.index, body)
        return told

    def ending(self, answer: Answer) -> str:
        return self._head.ending(answer)

    def broken(self, error: ApiError) -> str:
        return self._head.broken(error)

    def _logprobs(self, scored: Iterable[Scored]) -> dict[str, Any]:
        content = [
            {**self._one(s.id, s.logprob), "top_logprobs": [self._one(id, logprob) for id, logprob in s.likeliest]}
            for s in scored
        ]
        return {"content": content, "refusal": None}

    def _one(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text.token_text(id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._text.token_bytes(id)),
        }


def _prompt_logprobs(delta: Delta, shown: Shown, text: Text) -> dict[str, Any]:
    """As vLLM tells them: of each position an object by token id, null for the first."""
    if shown.prompt < 0 or delta.prompt is None:
        return {}

    def one(id: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        about = {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text.token_text(id)}
        return str(id), about

    told: list[dict[str, Any] | None] = [None]
    for id, logprob, rank, best in delta.prompt:
        likeliest = [one(other, value, i + 1) for i, (other, value) in enumerate(best[: shown.prompt])]
        told.append(dict([one(id, logprob, rank), *(entry for entry in likeliest if entry[0] != str(id))]))
    return {"prompt_logprobs": told}


def _scores(delta: Delta) -> dict[str, Any]:
    """What a choice says of itself beside OpenAI's fields: a beam its score, one cut short by time that it was."""
    if delta.finish is FinishReason.TIMEOUT:
        return {"stop_reason": "timeout"}
    if delta.beam is None:
        return {}
    beam = delta.beam
    return {
        "cumulative_logprob": max(beam.cumulative_logprob, LEAST_LOGPROB),
        "beam_score": max(beam.score, LEAST_LOGPROB),
    }


def _why(delta: Delta) -> str:
    return ',"stop_reason":"timeout"' if delta.finish is FinishReason.TIMEOUT else ""


def _finish(delta: Delta) -> str | None:
    return _FINISH.get(delta.finish) if delta.finish is not None else None
