"""The requests that clients may send, field by field.

Names and defaults are OpenAI's where it has them, else vLLM's. What is here is what is honoured: a field that would
change the answer and is not honoured is refused by name rather than ignored.

Beam search: `use_beam_search` turns it on, as does `beam_width`. `n` choices are returned, best first, of a search
that is `beam_width` wide; without `beam_width` it is `n` wide, as vLLM has it.
"""

import re
from dataclasses import dataclass
from typing import Any

from kilburn.controller.api.checks import (
    Check,
    Entry,
    Flag,
    Many,
    OneOf,
    Real,
    Tree,
    Unsupported,
    Whole,
    Words,
    knob,
    needed,
)
from kilburn.controller.api.errors import ApiError, bad_request
from kilburn.controller.core.events import BeamSettings, EarlyStopping

INT32_MAX = 2**31 - 1
MOST_CHARS = 1 << 24  # of one prompt; the body's own limit is usually lower
MOST_PROMPTS = 64
MOST_CHOICES = 128  # sequences of one request; a server may allow fewer
MOST_BEAMS = 16
MOST_MESSAGES = 4096
MOST_STOPS = 16
MOST_STOP_CHARS = 256
MOST_STOP_IDS = 256
MOST_BIASES = 1024
MOST_LOGPROBS = 20
MOST_SALT_CHARS = 1024
MOST_PRIORITY = 100
MOST_TOOLS = 128
MOST_SECONDS = 86400.0
MOST_PROMPT_IDS = 1 << 20
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")  # of the model; of what is drawn from


@dataclass(frozen=True, slots=True)
class Prompts:
    """A text, token ids, or a list of either."""

    def read(self, value: Any, where: str) -> "tuple[str | tuple[int, ...], ...]":
        token, words = Whole(0, INT32_MAX), Words(MOST_CHARS)
        if isinstance(value, str):
            return (words.read(value, where),)
        if not isinstance(value, list):
            raise bad_request(where, f"{where} must be a string, a list of strings, token ids or a list of these")
        if not value:
            raise bad_request(where, f"{where} is empty; give at least one token")
        if isinstance(value[0], int):
            return (Many(token, MOST_PROMPT_IDS).read(value, where),)
        one: Check = words if isinstance(value[0], str) else Many(token, MOST_PROMPT_IDS)
        return Many(one, MOST_PROMPTS).read(value, where)


@dataclass(frozen=True, slots=True)
class StopTexts:
    """One stop string or several."""

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        word = Words(MOST_STOP_CHARS, least=1)
        if isinstance(value, str):
            return (word.read(value, where),)
        return Many(word, MOST_STOPS).read(value, where)


@dataclass(frozen=True, slots=True)
class Biases:
    """{"token id": bias}. The ids are compared with the vocabulary once that is known."""

    def read(self, value: Any, where: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > MOST_BIASES:
            raise bad_request(where, f"{where} must be an object of at most {MOST_BIASES} entries")
        biases: dict[int, float] = {}
        for name, bias in value.items():
            if not (name.isascii() and name.isdigit() and len(name) <= 10):
                raise bad_request(where, f"{where} must have token ids as its keys")
            biases[int(name)] = Real(-100.0, 100.0).read(bias, f"{where}.{int(name)}")
        return tuple(biases.items())


@dataclass(frozen=True, slots=True)
class Early:
    """false, true or "never", as transformers has it."""

    def read(self, value: Any, where: str) -> EarlyStopping:
        if value is False:
            return EarlyStopping.HEURISTIC
        if value is True:
            return EarlyStopping.FULL
        if value == "never":
            return EarlyStopping.NEVER
        raise bad_request(where, f'{where} must be false, true or "never"')


# With beams, what these fields ask for cannot be had: the values that ask for nothing, and what to do.
_NOT_WITH_BEAMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "no token is certain before the search is over"),
    "stop": (((),), "use stop_token_ids"),
    "presence_penalty": ((0.0,), "leave it out"),
    "frequency_penalty": ((0.0,), "leave it out"),
    "repetition_penalty": ((1.0,), "leave it out"),
    "temperature": ((0.0, 1.0), "a search draws nothing"),
    "top_p": ((1.0,), "a search draws nothing"),
    "top_k": ((0, -1), "a search draws nothing"),
    "min_p": ((0.0,), "a search draws nothing"),
    "logprobs": ((None, False), "each choice says its cumulative_logprob"),
    "prompt_logprobs": ((None,), "ask for them without a search"),
    "best_of": ((None,), "use beam_width"),
    "structured_outputs": ((None,), "leave it out"),
    "guided_json": ((None,), "leave it out"),
    "guided_regex": ((None,), "leave it out"),
    "guided_choice": ((None,), "leave it out"),
    "guided_grammar": ((None,), "leave it out"),
    "response_format": ((None,), "leave it out"),
}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    include_usage: bool = knob(Flag(), False)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The fields that every request for an answer has, whatever its API."""

    model: str = knob(Words(256), "")
    stream: bool = knob(Flag(), False)
    priority: int = knob(Whole(-MOST_PRIORITY, MOST_PRIORITY), 0)  # lower runs first; a server may allow fewer
    timeout: float | None = knob(Real(0.0, MOST_SECONDS, open_low=True), None)  # seconds in all, and
    queue_timeout: float | None = knob(Real(0.0, MOST_SECONDS, open_low=True), None)  # to begin: within the server's
    cache_salt: str = knob(Words(MOST_SALT_CHARS), "")


@dataclass(frozen=True, kw_only=True)
class Choosing(Served):
    """The fields that completions and chat share."""

    max_tokens: int | None = knob(Whole(0, INT32_MAX), None)
    temperature: float = knob(Real(0.0, 2.0), 1.0)
    top_p: float = knob(Real(0.0, 1.0), 1.0)
    top_k: int = knob(Whole(-1, INT32_MAX), 0)
    min_p: float = knob(Real(0.0, 1.0), 0.0)
    presence_penalty: float = knob(Real(-2.0, 2.0), 0.0)
    frequency_penalty: float = knob(Real(-2.0, 2.0), 0.0)
    repetition_penalty: float = knob(Real(0.0, 100.0, open_low=True), 1.0)
    logit_bias: tuple[tuple[int, float], ...] = knob(Biases(), ())
    seed: int | None = knob(Whole(-(2**63), 2**64 - 1), None)
    stop: tuple[str, ...] = knob(StopTexts(), ())
    stop_token_ids: tuple[int, ...] = knob(Many(Whole(0, INT32_MAX), MOST_STOP_IDS), ())
    min_tokens: int = knob(Whole(0, INT32_MAX), 0)
    ignore_eos: bool = knob(Flag(), False)
    include_stop_str_in_output: bool = knob(Flag(), False)
    skip_special_tokens: bool = knob(Flag(), True)
    allow_special_tokens: bool = knob(Flag(), False)  # ours: control tokens written out in the text count as such
    n: int = knob(Whole(1, MOST_CHOICES), 1)
    stream_options: StreamOptions | None = knob(Entry(StreamOptions), None)
    use_beam_search: bool | None = knob(Flag(), None)
    beam_width: int | None = knob(Whole(1, MOST_BEAMS), None)
    length_penalty: float = knob(Real(-10.0, 10.0), 1.0)
    early_stopping: EarlyStopping = knob(Early(), EarlyStopping.HEURISTIC)
    prompt_logprobs: int | None = knob(Whole(0, MOST_LOGPROBS), None)
    logprobs_mode: str = knob(OneOf(LOGPROBS_MODES), LOGPROBS_MODES[0])
    timings: bool = knob(Flag(), False)  # ours: where the time went, in the answer
    truncate_prompt_tokens: None = knob(Unsupported((), "shorten the prompt yourself"), None)
    allowed_token_ids: None = knob(Unsupported(([],), "use logit_bias"), None)
    bad_words: None = knob(Unsupported(([],), "use logit_bias"), None)
    logits_processors: None = knob(Unsupported(([],), "leave it out"), None)
    structured_outputs: None = knob(Unsupported(({},), "leave it out"), None)
    guided_json: None = knob(Unsupported((), "leave it out"), None)
    guided_regex: None = knob(Unsupported((), "leave it out"), None)
    guided_choice: None = knob(Unsupported((), "leave it out"), None)
    guided_grammar: None = knob(Unsupported((), "leave it out"), None)
    response_format: None = knob(Unsupported(({"type": "text"},), "only plain text is produced"), None)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.use_beam_search is False and self.beam_width is not None:
            raise bad_request("beam_width", "beam_width wants use_beam_search: true, or to be left out")
        if self.beams is None:
            if self.length_penalty != 1.0:
                raise bad_request("length_penalty", "length_penalty wants use_beam_search: true")
            if self.early_stopping is not EarlyStopping.HEURISTIC:
                raise bad_request("early_stopping", "early_stopping wants use_beam_search: true")
            return
        if self.beams.width > MOST_BEAMS:
            raise bad_request("n", f"a beam search is at most {MOST_BEAMS} wide; lower n")
        if self.n > self.beams.width:
            raise bad_request("n", f"n must not exceed beam_width, which is {self.beams.width}")
        for name, (neutral, instead) in _NOT_WITH_BEAMS.items():
            value = getattr(self, name, neutral[0])
            if not any(type(value) is type(same) and value == same for same in neutral):
                message = f"{name} cannot be had together with beam search; {instead}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        if self.max_tokens == 0:
            raise bad_request("max_tokens", "max_tokens must be at least 1 with beam search")

    @property
    def beams(self) -> BeamSettings | None:
        """The search that is asked for."""
        if not self.use_beam_search and self.beam_width is None:
            return None
        width = self.beam_width if self.beam_width is not None else self.n
        return BeamSettings(width, self.length_penalty, self.early_stopping)

    @property
    def width(self) -> int:
        """Sequences that one prompt asks for."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Choosing):
    prompt: tuple[str | tuple[int, ...], ...] = knob(Prompts(), ())
    add_special_tokens: bool = knob(Flag(), True)
    echo: bool = knob(Flag(), False)
    logprobs: int | None = knob(Whole(0, MOST_LOGPROBS), None)
    best_of: int | None = knob(Whole(1, MOST_CHOICES), None)
    suffix: None = knob(Unsupported(("",), "this model continues text and does not fill gaps"), None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise bad_request("prompt", "prompt is missing or empty; give at least one token")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise bad_request(
                "max_tokens", "max_tokens must be at least 1, unless echo or prompt_logprobs is asked for"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise bad_request("best_of", f"best_of must be at least n, which is {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise bad_request("best_of", "best_of beyond n cannot be streamed: the best is known at the end")

    @property
    def width(self) -> int:
        return super().width if self.best_of is None else self.best_of


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Choosing):
    messages: tuple[dict[str, Any], ...] = needed(Many(Tree(MOST_CHARS), MOST_MESSAGES, least=1))
    max_completion_tokens: int | None = knob(Whole(1, INT32_MAX), None)
    logprobs: bool = knob(Flag(), False)
    top_logprobs: int | None = knob(Whole(0, MOST_LOGPROBS), None)
    add_generation_prompt: bool | None = knob(Flag(), None)
    continue_final_message: bool = knob(Flag(), False)
    chat_template_kwargs: dict[str, Any] | None = knob(Tree(4096), None)
    chat_template: None = knob(Unsupported((), "only the model's own template is used"), None)
    tool_choice: None = knob(Unsupported(("none",), "calls of tools are not parsed"), None)
    tools: None = knob(Unsupported(([],), "calls of tools are not parsed"), None)
    functions: None = knob(Unsupported(([],), "calls of functions are not parsed"), None)
    modalities: None = knob(Unsupported((["text"],), "only text is produced"), None)
    audio: None = knob(Unsupported((), "only text is produced"), None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs wants logprobs: true")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise bad_request("max_tokens", "max_tokens must be at least 1, unless prompt_logprobs is asked for")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, dict):
            raise bad_request("chat_template_kwargs", "chat_template_kwargs must be an object")


@dataclass(frozen=True, kw_only=True)
class PrefixRequest:
    """A name for a text, or for the messages that chats begin with."""

    name: str = needed(Words(64, least=1))
    text: str | None = knob(Words(MOST_CHARS), None)
    messages: tuple[dict[str, Any], ...] | None = knob(Many(Tree(MOST_CHARS), MOST_MESSAGES, least=1), None)
    model: str = knob(Words(256), "")
    public: bool = knob(Flag(), False)
    add_special_tokens: bool = knob(Flag(), True)
    allow_special_tokens: bool = knob(Flag(), False)
    cache_salt: str = knob(Words(MOST_SALT_CHARS), "")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise bad_request("name", "name has 1 to 64 letters, digits, '.', '_' or '-'")
        if (self.text is None) == (self.messages is None):
            raise bad_request("text", "give either text or messages")
        if self.public and self.cache_salt:
            raise bad_request("cache_salt", "cache_salt has no meaning for a public prefix; leave it out")


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """vLLM's: a prompt, or messages."""

    model: str = knob(Words(256), "")
    prompt: str | None = knob(Words(MOST_CHARS), None)
    messages: tuple[dict[str, Any], ...] | None = knob(Many(Tree(MOST_CHARS), MOST_MESSAGES, least=1), None)
    add_special_tokens: bool | None = knob(Flag(), None)
    add_generation_prompt: bool = knob(Flag(), True)
    continue_final_message: bool = knob(Flag(), False)
    allow_special_tokens: bool = knob(Flag(), False)
    return_token_strs: bool = knob(Flag(), False)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("prompt", "give either prompt or messages")


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest:
    tokens: tuple[int, ...] = needed(Many(Whole(0, INT32_MAX), MOST_PROMPT_IDS))
    model: str = knob(Words(256), "")
