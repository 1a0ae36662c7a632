"""How answers look to clients of OpenAI's Responses: a response of items, whole or as named, numbered events.

response.created  response.in_progress
    response.output_item.added                                              of each item
        words   content_part.added  output_text.delta ...  output_text.done  content_part.done
        a call  function_call_arguments.delta ...  function_call_arguments.done
    response.output_item.done
response.completed, or response.incomplete where the answer was cut at its length, or response.failed
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from kilburn.controller.answer import Answer
from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.items import Begun, Ended, Item, Items, More, Step
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.responses import ResponsesRequest
from kilburn.controller.api.sse import frame
from kilburn.controller.calls.reading import CallReader
from kilburn.controller.choice import Delta
from kilburn.shared.types import FinishReason


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


class ResponsesLayout:
    def __init__(self, model: str, wanted: ResponsesRequest, reader: CallReader | None) -> None:
        unique = uuid4().hex
        self.id = f"resp_{unique}"
        self._items = Items(reader)
        self._prefix = unique
        self._number = 0
        self._finish: FinishReason | None = None
        self._tells_timings = wanted.timings
        self._about = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_repeated(wanted),
        }

    def whole(self, answer: Answer, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        self._items.feed(delta.text, True)
        self._finish = delta.finish
        return self._over(answer)

    def opening(self, answer: Answer) -> str:
        kinds = ("response.created", "response.in_progress")
        return "".join([self._event(kind, response=self._response("in_progress")) for kind in kinds])

    def chunks(self, delta: Delta) -> str:
        self._finish = delta.finish
        steps = self._items.feed(delta.text, delta.finish is not None)
        return "".join([event for step in steps for event in self._told(step)])

    def ending(self, answer: Answer) -> str:
        over = self._over(answer)
        return self._event(f"response.{over['status']}", response=over)

    def broken(self, error: ApiError) -> str:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # of the few that they list
        failed = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=failed)

    # ---

    def _over(self, answer: Answer) -> dict[str, Any]:
        is_complete = self._finish is FinishReason.STOP
        over = self._response("completed" if is_complete else "incomplete")
        details = None if is_complete else {"reason": "max_output_tokens"}
        output = [self._item(item, "completed" if is_complete else "incomplete") for item in self._items.all]
        timings = {"timings": answer.timings.as_data()} if self._tells_timings else {}
        return over | {"incomplete_details": details, "output": output, "usage": usage(answer), **timings}

    def _response(self, status: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._about, "status": status, **empty}

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return frame(to_json(event), kind)

    def _told(self, step: Step) -> Iterator[str]:
        match step:
            case Begun(item=item):
                fresh = Item(item.index, item.call)
                yield self._event("response.output_item.added", output_index=item.index, item=self._begun(fresh))
                if item.call is None:
                    yield self._of_part("response.content_part.added", item, part=_part(""))
            case More(item=item, text=text) if item.call is None:
                yield self._of_part("response.output_text.delta", item, delta=text, logprobs=[])
            case More(item=item, text=text):
                yield self._of_item("response.function_call_arguments.delta", item, delta=text)
            case Ended(item=item):
                if item.call is None:
                    yield self._of_part("response.output_text.done", item, text=item.text, logprobs=[])
                    yield self._of_part("response.content_part.done", item, part=_part(item.text))
                else:
                    fields = {"name": item.call.name, "arguments": item.text}
                    yield self._of_item("response.function_call_arguments.done", item, **fields)
                is_cut = self._finish not in (None, FinishReason.STOP)
                whole = self._item(item, "incomplete" if is_cut else "completed")
                yield self._event("response.output_item.done", output_index=item.index, item=whole)

    def _of_item(self, kind: str, item: Item, **fields: Any) -> str:
        return self._event(kind, item_id=self._id(item), output_index=item.index, **fields)

    def _of_part(self, kind: str, item: Item, **fields: Any) -> str:
        return self._of_item(kind, item, content_index=0, **fields)

    def _id(self, item: Item) -> str:
        return f"{'msg' if item.call is None else 'fc'}_{self._prefix}{item.index:02x}"

    def _begun(self, item: Item) -> dict[str, Any]:
        empty: dict[str, Any] = {"content": []} if item.call is None else {}
        return self._item(item, "in_progress") | empty

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        about = {"id": self._id(item), "status": status}
        if item.call is None:
            return {**about, "type": "message", "role": "assistant", "content": [_part(item.text)]}
        call = {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
        return {**about, "type": "function_call", **call}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _repeated(wanted: ResponsesRequest) -> dict[str, Any]:
    """What a response says again of its request."""
    return {
        "instructions": wanted.instructions or None,
        "max_output_tokens": wanted.max_output_tokens,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": wanted.temperature,
        "text": wanted.text or {"format": {"type": "text"}},
        "tool_choice": wanted.tool_choice or "auto",
        "tools": list(wanted.tools),
        "top_p": wanted.top_p,
        "truncation": "disabled",
        "user": wanted.user or None,
    }
