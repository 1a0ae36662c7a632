"""What streams of Responses and of Anthropic's messages say, as JSON Schema: each event is one of some closed objects.

    ResponseEvent    each has its `type` and its `sequence_number`; what else depends on the type
    MessageEvent     each has its `type`

Made of the parts of answers.py, since events hold what whole answers hold. The chunks of completions and chats, which
have one form, are there.
"""

from kilburn.controller.api.answers import (
    ANTHROPICS_ERROR,
    BLOCK,
    COUNT,
    ITEM,
    MESSAGE,
    NULL,
    PART,
    SPENT,
    STOPPED,
    TEXT,
    closed,
    one_of,
    ref,
)
from kilburn.controller.api.checks import JsonSchema

NONE_YET: JsonSchema = {"type": "array", "maxItems": 0}


# --- OpenAI's Responses


def _of_response(*kinds: str, **fields: JsonSchema) -> JsonSchema:
    return closed({"type": one_of(*kinds), "sequence_number": COUNT, **fields})


def _of_item(kind: str, **fields: JsonSchema) -> JsonSchema:
    return _of_response(kind, item_id=TEXT, output_index=COUNT, **fields)


def _of_part(kind: str, **fields: JsonSchema) -> JsonSchema:
    return _of_item(kind, content_index=COUNT, **fields)


_RESPONSES = (
    _of_response(
        *(f"response.{what}" for what in ("created", "in_progress", "completed", "incomplete", "failed")),
        response=ref("Response"),
    ),
    _of_response("response.output_item.added", "response.output_item.done", output_index=COUNT, item=ITEM),
    _of_part("response.content_part.added", part=PART),
    _of_part("response.content_part.done", part=PART),
    _of_part("response.output_text.delta", delta=TEXT, logprobs=NONE_YET),
    _of_part("response.output_text.done", text=TEXT, logprobs=NONE_YET),
    _of_item("response.function_call_arguments.delta", delta=TEXT),
    _of_item("response.function_call_arguments.done", name=TEXT, arguments=TEXT),
    _of_response("error", code=TEXT, message=TEXT, param=NULL),  # a gateway's, whose controller is lost
)

# --- Anthropic's messages


def _of_message(kind: str, **fields: JsonSchema) -> JsonSchema:
    return closed({"type": one_of(kind), **fields})


_DELTAS: JsonSchema = {
    "anyOf": [_of_message("text_delta", text=TEXT), _of_message("input_json_delta", partial_json=TEXT)]
}
_MESSAGES = (
    _of_message("message_start", message=closed({**MESSAGE, "content": NONE_YET, **dict.fromkeys(STOPPED, NULL)})),
    _of_message("ping"),
    _of_message("content_block_start", index=COUNT, content_block=BLOCK),
    _of_message("content_block_delta", index=COUNT, delta=_DELTAS),
    _of_message("content_block_stop", index=COUNT),
    _of_message("message_delta", delta=closed(STOPPED), usage=SPENT),
    closed({"type": one_of("message_stop")}, may={"timings": ref("Timings")}),
    ANTHROPICS_ERROR,
)

EVENTS: dict[str, JsonSchema] = {
    "ResponseEvent": {"description": "One event of a stream.", "anyOf": [*_RESPONSES]},
    "MessageEvent": {"description": "One event of a stream.", "anyOf": [*_MESSAGES]},
}
