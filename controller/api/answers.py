"""What every route answers, as JSON Schema: the other half of the document.

    ANSWERS: name of a schema -> the schema       openapi.py says which route answers with which

Each object is closed: it has the fields that are named here and no others, so an answer with a field that nobody wrote
down is as wrong as one that lacks a field. Layouts make answers as plain dictionaries; that they are these is held by
tests, which compare real answers of all routes with the document.
"""

from typing import Any

from kilburn.controller.api.checks import JsonSchema

TEXT: JsonSchema = {"type": "string"}
FLAG: JsonSchema = {"type": "boolean"}
COUNT: JsonSchema = {"type": "integer", "minimum": 0}
NUMBER: JsonSchema = {"type": "number"}
SECONDS: JsonSchema = {"type": "number", "minimum": 0}
NULL: JsonSchema = {"type": "null"}
ANY: JsonSchema = {"type": "object"}  # of others' making


def ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def closed(fields: dict[str, JsonSchema], *, may: dict[str, JsonSchema] | None = None, about: str = "") -> JsonSchema:
    """An object that has all `fields`, perhaps some that it `may` have, and nothing else."""
    described = {"description": about} if about else {}
    properties = {**fields, **(may or {})}
    return {
        "type": "object",
        **described,
        "properties": properties,
        "required": list(fields),
        "additionalProperties": False,
    }


def many(of: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": of}


def mapped(to: JsonSchema) -> JsonSchema:
    return {"type": "object", "additionalProperties": to}


def or_null(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema, NULL]}


def one_of(*words: Any) -> JsonSchema:
    return {"enum": list(words)}


LOGPROB: JsonSchema = {"type": "number", "maximum": 0}
TIMINGS = closed(
    {"queue": SECONDS, "prefill": SECONDS, "decode": SECONDS, "swap": SECONDS},
    may={"cached_tokens": COUNT, "preemptions": COUNT},
    about="Where the time of a call went, in seconds.",
)
USAGE = closed(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
    }
)

# --- OpenAI's completions and chats

_PROMPT_LOGPROBS = many(or_null(mapped(closed({"logprob": LOGPROB, "rank": COUNT, "decoded_token": TEXT}))))
_COMPLETION_LOGPROBS = closed(
    {
        "tokens": many(TEXT),
        "token_logprobs": many(or_null(LOGPROB)),
        "top_logprobs": many(or_null(mapped(LOGPROB))),
        "text_offset": many(COUNT),
    }
)
_TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": many({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS = closed({"content": many(closed({**_TOKEN, "top_logprobs": many(closed(_TOKEN))})), "refusal": NULL})
_CALL = closed(
    {"id": TEXT, "type": one_of("function"), "function": closed({"name": TEXT, "arguments": TEXT})},
    may={"index": COUNT},
)
_MORE_OF_CALL = closed({"index": COUNT, "function": closed({"arguments": TEXT})})
_FINISHED = one_of("stop", "length", "tool_calls")
_TIMED_OUT = {"stop_reason": one_of("timeout")}
_SCORES = {**_TIMED_OUT, "cumulative_logprob": LOGPROB, "beam_score": NUMBER}


def _head(kind: str) -> dict[str, JsonSchema]:
    return {"id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT}


def _chunk(kind: str, choice: JsonSchema, about: str) -> JsonSchema:
    may = {"usage": or_null(ref("Usage")), "timings": ref("Timings")}
    return closed({**_head(kind), "choices": many(choice)}, may=may, about=about)


_CHOICE = {"index": COUNT, "text": TEXT, "logprobs": or_null(_COMPLETION_LOGPROBS)}
_ANSWERED = {"index": COUNT, "logprobs": or_null(_CHAT_LOGPROBS)}
_MESSAGE = closed(
    {"role": one_of("assistant"), "content": or_null(TEXT), "refusal": NULL}, may={"tool_calls": many(_CALL)}
)
_DELTA = closed(
    {}, may={"role": one_of("assistant"), "content": TEXT, "tool_calls": many({"anyOf": [_CALL, _MORE_OF_CALL]})}
)
OPENAIS: dict[str, JsonSchema] = {
    "Completion": closed(
        {
            **_head("text_completion"),
            "choices": many(
                closed({**_CHOICE, "finish_reason": _FINISHED}, may={**_SCORES, "prompt_logprobs": _PROMPT_LOGPROBS})
            ),
            "usage": ref("Usage"),
        },
        may={"timings": ref("Timings")},
    ),
    "CompletionChunk": _chunk(
        "text_completion",
        closed({**_CHOICE, "finish_reason": or_null(_FINISHED)}, may=_TIMED_OUT),
        "One event of a stream, before [DONE].",
    ),
    "ChatCompletion": closed(
        {
            **_head("chat.completion"),
            "choices": many(closed({**_ANSWERED, "message": _MESSAGE, "finish_reason": _FINISHED}, may=_SCORES)),
            "usage": ref("Usage"),
        },
        may={"timings": ref("Timings"), "prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    "ChatCompletionChunk": _chunk(
        "chat.completion.chunk",
        closed({**_ANSWERED, "delta": _DELTA, "finish_reason": or_null(_FINISHED)}, may=_TIMED_OUT),
        "One event of a stream, before [DONE].",
    ),
}

# --- OpenAI's Responses

_STATUS = one_of("completed", "incomplete", "in_progress")
PART = closed({"type": one_of("output_text"), "text": TEXT, "annotations": many(ANY), "logprobs": many(ANY)})
_WORDS = closed(
    {"id": TEXT, "status": _STATUS, "type": one_of("message"), "role": one_of("assistant"), "content": many(PART)}
)
_CALLED = {"call_id": TEXT, "name": TEXT, "arguments": TEXT}
ITEM: JsonSchema = {
    "anyOf": [_WORDS, closed({"id": TEXT, "status": _STATUS, "type": one_of("function_call"), **_CALLED})]
}
RESPONSE = closed(
    {
        "id": TEXT,
        "object": one_of("response"),
        "created_at": COUNT,
        "model": TEXT,
        "status": one_of("completed", "incomplete", "in_progress", "failed"),
        "error": or_null(closed({"code": TEXT, "message": TEXT})),
        "incomplete_details": or_null(closed({"reason": one_of("max_output_tokens")})),
        "output": many(ITEM),
        "usage": or_null(
            closed(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": closed({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": closed({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
        "instructions": or_null(TEXT),
        "max_output_tokens": or_null(COUNT),
        "metadata": ANY,
        "parallel_tool_calls": FLAG,
        "previous_response_id": NULL,
        "store": FLAG,
        "temperature": NUMBER,
        "text": ANY,
        "tool_choice": {"type": ["string", "object"]},
        "tools": many(ANY),
        "top_p": NUMBER,
        "truncation": one_of("disabled"),
        "user": or_null(TEXT),
    },
    may={"timings": ref("Timings")},
)

# --- Anthropic's messages

BLOCK: JsonSchema = {
    "anyOf": [
        closed({"type": one_of("text"), "text": TEXT}),
        closed({"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": ANY}),
    ]
}
STOPPED: dict[str, JsonSchema] = {
    "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    "stop_sequence": or_null(TEXT),
}
_SPENT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
SPENT = closed(dict.fromkeys(_SPENT, COUNT))
MESSAGE: dict[str, JsonSchema] = {
    "id": TEXT,
    "type": one_of("message"),
    "role": one_of("assistant"),
    "model": TEXT,
    "content": many(BLOCK),
    **STOPPED,
    "usage": SPENT,
}
ANTHROPICS: dict[str, JsonSchema] = {
    "Message": closed(MESSAGE, may={"timings": ref("Timings")}),
    "TokenCount": closed({"input_tokens": COUNT}),
}

# --- what the service says of itself

_MODEL = {
    "id": TEXT,
    "object": one_of("model"),
    "created": COUNT,
    "owned_by": TEXT,
    "max_model_len": or_null(COUNT),
    "type": one_of("model"),
    "display_name": TEXT,
    "created_at": TEXT,
}
_STATES = one_of("ready", "failed", "known", "pending")
_PREFIX = {"name": TEXT, "object": one_of("prefix"), "public": FLAG, "tokens": COUNT, "blocks": COUNT, "state": _STATES}
_TURN = closed({"turn": TEXT, "at_s": NUMBER, "since_s": or_null(NUMBER), "text": TEXT})
_STORY = closed(
    {
        **dict.fromkeys(("id", "tenant", "state", "reason"), TEXT),
        **dict.fromkeys(("client_id", "trace_id"), or_null(TEXT)),
        **dict.fromkeys(("request", "prompt_tokens", "cached_tokens", "max_tokens", "choices"), COUNT),
        **dict.fromkeys(("output_tokens", "preemptions", "turns_dropped"), COUNT),
        "finish_reasons": mapped(TEXT),
        "submitted_at": NUMBER,
        **dict.fromkeys(("started_s", "first_token_s", "ended_s"), or_null(SECONDS)),
        "turns": many(_TURN),
    }
)
_GROUP = {
    "object": one_of("group"),
    "name": TEXT,
    "state": TEXT,
    **dict.fromkeys(("lease", "running_requests", "waiting_requests", "num_blocks", "owned_blocks"), COUNT),
}


def _listed(name: str, may: dict[str, JsonSchema] | None = None) -> JsonSchema:
    return closed({"object": one_of("list"), "data": many(ref(name)), **(may or {})})


SERVICES: dict[str, JsonSchema] = {
    "Model": closed(_MODEL),
    "ModelList": _listed("Model", {"has_more": FLAG, "first_id": TEXT, "last_id": TEXT}),
    "Prefix": closed(_PREFIX, may={"message": TEXT}),
    "PrefixList": _listed("Prefix"),
    "PrefixDeleted": closed({"name": TEXT, "object": one_of("prefix"), "deleted": FLAG}),
    "Tokens": closed(
        {"count": COUNT, "max_model_len": or_null(COUNT), "tokens": many(COUNT), "token_strs": or_null(many(TEXT))}
    ),
    "Text": closed({"prompt": TEXT}),
    "Stories": closed({"requests": many(_STORY)}),
    "Group": closed(_GROUP),
    "GroupList": _listed("Group"),
    "Probe": closed({"status": one_of("ok", "unavailable")}, may={"reason": TEXT}),
}

# --- errors

_OPENAIS_ERROR = closed(
    {"error": closed({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)})}
)
ANTHROPICS_ERROR = closed({"type": one_of("error"), "error": closed({"type": TEXT, "message": TEXT})})
ERROR: JsonSchema = {
    "description": "OpenAI's shape; under /v1/messages, and for whoever sends anthropic-version, Anthropic's.",
    "anyOf": [_OPENAIS_ERROR, ANTHROPICS_ERROR],
}

ANSWERS: dict[str, JsonSchema] = {
    "Usage": USAGE,
    "Timings": TIMINGS,
    **OPENAIS,
    "Response": RESPONSE,
    **ANTHROPICS,
    **SERVICES,
    "Error": ERROR,
}
