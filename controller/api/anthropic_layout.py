"""How answers look to Anthropic's clients: a message of content blocks, whole or as named events.

    message_start  ( content_block_start  content_block_delta ...  content_block_stop ) ...  message_delta  message_stop

Counts: their `input_tokens` are those that were not found in the cache. How many were is known when the first text is,
so the last event says it, and the first one what would be true without a cache.
"""

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from kilburn.controller.answer import Answer
from kilburn.controller.api.errors import ApiError, encoded_for_anthropic
from kilburn.controller.api.items import Begun, Ended, Item, Items, More, Step
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.sse import frame
from kilburn.controller.calls.reading import CallReader
from kilburn.controller.choice import Delta
from kilburn.shared.types import FinishReason


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.num_tokens,
    }


class AnthropicLayout:
    def __init__(self, model: str, reader: CallReader | None, *, tells_timings: bool = False) -> None:
        self._tells_timings = tells_timings
        self.id = f"msg_{uuid4().hex}"
        self._items = Items(reader)
        self._about = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        self._items.feed(delta.text, True)
        self._ended(delta)
        return {
            **self._about,
            "content": [_block(item) for item in self._items.all],
            **self._end,
            "usage": usage(answer),
            **self._timings(answer),
        }

    def _timings(self, answer: Answer) -> dict[str, Any]:
        return {"timings": answer.timings.as_data()} if self._tells_timings else {}

    def opening(self, answer: Answer) -> str:
        counts = usage(answer) | {"output_tokens": 0}
        begun = {**self._about, "content": [], **self._end, "usage": counts}
        return _event("message_start", message=begun) + _event("ping")

    def chunks(self, delta: Delta) -> str:
        steps = self._items.feed(delta.text, delta.finish is not None)
        if delta.finish is not None:
            self._ended(delta)
        return "".join(map(_told, steps))

    def ending(self, answer: Answer) -> str:
        return _event("message_delta", delta=self._end, usage=usage(answer)) + _event(
            "message_stop", **self._timings(answer)
        )

    def broken(self, error: ApiError) -> str:
        return frame(encoded_for_anthropic(error), "error")

    def _ended(self, delta: Delta) -> None:
        if delta.finish is not FinishReason.STOP:
            self._end["stop_reason"] = "max_tokens"
        elif delta.stop:
            self._end |= {"stop_reason": "stop_sequence", "stop_sequence": delta.stop}
        else:
            self._end["stop_reason"] = "tool_use" if self._items.has_calls else "end_turn"


def _event(kind: str, **fields: Any) -> str:
    return frame(to_json({"type": kind, **fields}), kind)


def _told(step: Step) -> str:
    index = step.item.index
    match step:
        case Begun(item=item):
            return _event("content_block_start", index=index, content_block=_block(Item(index, item.call)))  # empty yet
        case More(item=item, text=text):
            kind, name = ("text_delta", "text") if item.call is None else ("input_json_delta", "partial_json")
            return _event("content_block_delta", index=index, delta={"type": kind, name: text})
        case Ended():
            return _event("content_block_stop", index=index)


def _block(item: Item) -> dict[str, Any]:
    if item.call is None:
        return {"type": "text", "text": item.text}
    try:
        arguments = json.loads(item.text or "{}")
    except ValueError:
        arguments = None
    # Cut short, or not the JSON that it should be: there is no object to give, and the words are all there is.
    given = arguments if isinstance(arguments, dict) else {"": item.text}
    return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": given}
