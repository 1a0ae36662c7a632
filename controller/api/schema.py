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
    JsonSchema,
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
from kilburn.controller.api.structure import (
    CHECKS,
    Format,
    StructuredOutputs,
    Tool,
    Toolbox,
    ToolCheck,
    ToolChoice,
    ToolChoiceCheck,
    bound_by,
)
from kilburn.controller.core.events import BeamSettings, EarlyStopping
from kilburn.controller.grammars import Wanted

INT32_MAX = 2**31 - 1
# What a server may be set to allow; by default it allows less of most (shared/config.py).
MOST_CHARS = 1 << 24  # of one prompt; the body's own limit is usually lower
MOST_PROMPTS = 1024
MOST_CHOICES = 128  # sequences of one request
MOST_BEAMS = 16
MOST_MESSAGES = 65536
MOST_STOPS = 64
MOST_STOP_CHARS = 256
MOST_STOP_IDS = 1024
MOST_BIASES = 16384
MOST_LOGPROBS = 20
MOST_SALT_CHARS = 1024
MOST_PRIORITY = 100
MOST_TOOLS = 1024
MOST_SECONDS = 86400.0
MOST_PROMPT_IDS = 1 << 20
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")  # of the model; of what is drawn from


@dataclass(frozen=True, slots=True)
class Prompts:
    """A text, token ids, or a list of either."""

    most: int

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
        return Many(one, self.most).read(value, where)

    def schema(self) -> JsonSchema:
        text, ids = Words(MOST_CHARS).schema(), Many(Whole(0, INT32_MAX), MOST_PROMPT_IDS, least=1).schema()
        several = [{"type": "array", "items": one, "minItems": 1, "maxItems": self.most} for one in (text, ids)]
        return {"anyOf": [text, ids, *several]}


@dataclass(frozen=True, slots=True)
class StopTexts:
    """One stop string or several."""

    most: int

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        word = Words(MOST_STOP_CHARS, least=1)
        if isinstance(value, str):
            return (word.read(value, where),)
        return Many(word, self.most).read(value, where)

    def schema(self) -> JsonSchema:
        word = Words(MOST_STOP_CHARS, least=1)
        return {"anyOf": [word.schema(), Many(word, self.most).schema()]}


@dataclass(frozen=True, slots=True)
class Biases:
    """{"token id": bias}. The ids are compared with the vocabulary once that is known."""

    most: int

    def read(self, value: Any, where: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise bad_request(where, f"{where} must be an object of at most {self.most} entries")
        biases: dict[int, float] = {}
        for name, bias in value.items():
            if not (name.isascii() and name.isdigit() and len(name) <= 10):
                raise bad_request(where, f"{where} must have token ids as its keys")
            biases[int(name)] = Real(-100.0, 100.0).read(bias, f"{where}.{int(name)}")
        return tuple(biases.items())

    def schema(self) -> JsonSchema:
        bias, names = Real(-100.0, 100.0).schema(), {"pattern": "^[0-9]{1,10}$"}
        return {"type": "object", "additionalProperties": bias, "propertyNames": names, "maxProperties": self.most}


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

    def schema(self) -> JsonSchema:
        return {"enum": [False, True, "never", None]}


# With beams, what these fields ask for cannot be had: the values that ask for nothing, and what to do.
_NOT_WITH_BEAMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "structured_outputs": ((None,), "leave it out"),
    "guided_json": ((None,), "leave it out"),
    "guided_regex": ((None,), "leave it out"),
    "guided_choice": ((None,), "leave it out"),
    "guided_grammar": ((None,), "leave it out"),
    "response_format": ((None,), "leave it out"),
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
}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    include_usage: bool = knob(Flag(), False, "A last event tells the counts of tokens.")


@dataclass(frozen=True, kw_only=True)
class Served:
    """The fields that every request for an answer has, whatever its API."""

    model: str = knob(Words(256), "", "The served model's name, or nothing.")
    stream: bool = knob(Flag(), False, "The answer comes as server-sent events, as it is made.")
    priority: int = knob(
        Whole(-MOST_PRIORITY, MOST_PRIORITY), 0, "Lower runs first; how low it may be is the server's setting."
    )
    timeout: float | None = knob(
        Real(0.0, MOST_SECONDS, open_low=True), None, "Seconds that the request may take in all, within the server's."
    )
    queue_timeout: float | None = knob(
        Real(0.0, MOST_SECONDS, open_low=True), None, "Seconds that it may wait to begin, within the server's."
    )
    cache_salt: str = knob(
        Words(MOST_SALT_CHARS), "", "Cached prefixes are shared with requests of the same salt only."
    )
    timings: bool = knob(Flag(), False, "The answer says where its time went; a stream in its last event.")


@dataclass(frozen=True, kw_only=True)
class Choosing(Served):
    """The fields that completions and chat share."""

    max_tokens: int | None = knob(Whole(0, INT32_MAX), None, "Tokens that the answer may have.")
    temperature: float = knob(Real(0.0, 2.0), 1.0, "0 takes the likeliest token always.")
    top_p: float = knob(Real(0.0, 1.0), 1.0, "Draws among the likeliest tokens that have this much probability.")
    top_k: int = knob(Whole(-1, INT32_MAX), 0, "Draws among so many likeliest tokens; 0 or -1: among all.")
    min_p: float = knob(Real(0.0, 1.0), 0.0, "Least probability of a token, relative to the likeliest one's.")
    presence_penalty: float = knob(Real(-2.0, 2.0), 0.0, "Taken off the logit of each token that the answer has.")
    frequency_penalty: float = knob(Real(-2.0, 2.0), 0.0, "Taken off as often as the answer has the token.")
    repetition_penalty: float = knob(
        Real(0.0, 100.0, open_low=True), 1.0, "Divides the logits of tokens that prompt or answer have."
    )
    logit_bias: tuple[tuple[int, float], ...] = knob(
        Biases(MOST_BIASES), (), "Added to the logits of tokens, by their ids.", limit="max_logit_bias"
    )
    seed: int | None = knob(Whole(-(2**63), 2**64 - 1), None, "The same draws again; none: other ones each time.")
    stop: tuple[str, ...] = knob(StopTexts(MOST_STOPS), (), "Texts that end the answer.", limit="max_stops")
    stop_token_ids: tuple[int, ...] = knob(
        Many(Whole(0, INT32_MAX), MOST_STOP_IDS), (), "Tokens that end the answer.", limit="max_stop_ids"
    )
    min_tokens: int = knob(Whole(0, INT32_MAX), 0, "No token or text ends the answer before it has so many.")
    ignore_eos: bool = knob(Flag(), False, "The model's own end-of-answer tokens do not end it.")
    include_stop_str_in_output: bool = knob(Flag(), False, "What ends the answer is left in it.")
    skip_special_tokens: bool = knob(Flag(), True, "Control tokens are no part of the text.")
    allow_special_tokens: bool = knob(Flag(), False, "Control tokens written out in the prompt count as such.")
    n: int = knob(Whole(1, MOST_CHOICES), 1, "Answers to one prompt.", limit="max_choices")
    user: str = knob(Words(512), "", "Whom the request is for; nothing is done with it.")
    stream_options: StreamOptions | None = knob(Entry(StreamOptions), None, "What a stream says besides.")
    use_beam_search: bool | None = knob(Flag(), None, "A search for the likeliest answers, in place of draws.")
    beam_width: int | None = knob(Whole(1, MOST_BEAMS), None, "How wide the search is; none: n.")
    length_penalty: float = knob(Real(-10.0, 10.0), 1.0, "Of a search: above 0 favours long answers.")
    early_stopping: EarlyStopping = knob(Early(), EarlyStopping.HEURISTIC, "Of a search: when it ends.")
    prompt_logprobs: int | None = knob(
        Whole(0, MOST_LOGPROBS),
        None,
        "Log probabilities of each token of the prompt and of so many likeliest ones.",
        limit="max_logprobs",
    )
    logprobs_mode: str = knob(
        OneOf(LOGPROBS_MODES), LOGPROBS_MODES[0], "Those of the model, or those of what is drawn from."
    )
    truncate_prompt_tokens: None = knob(Unsupported((), "shorten the prompt yourself"), None)
    allowed_token_ids: None = knob(Unsupported(([],), "use logit_bias"), None)
    bad_words: None = knob(Unsupported(([],), "use logit_bias"), None)
    logits_processors: None = knob(Unsupported(([],), "leave it out"), None)
    # A schema, once it is read; None: any text.
    response_format: Any = knob(Format(), None, "Whether the answer is any text, any JSON object, or JSON of a schema.")
    structured_outputs: tuple[str, Any] | None = knob(StructuredOutputs(), None, "What the answer has to look like.")
    guided_json: Any = knob(CHECKS["json"], None, "The answer is JSON of this schema.")
    guided_regex: str | None = knob(CHECKS["regex"], None, "The answer matches this regular expression.")
    guided_choice: tuple[str, ...] | None = knob(CHECKS["choice"], None, "The answer is one of these texts.")
    guided_grammar: str | None = knob(CHECKS["grammar"], None, "The answer follows this grammar: Lark or GBNF.")

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream")
        if self.bound_by is not None and self.ignore_eos:
            field = self.bound_by.where
            raise bad_request("ignore_eos", f"ignore_eos cannot be had together with {field}, which says where to end")
        self._check_beams()

    @property
    def bound_by(self) -> Wanted | None:
        """What the answer has to look like. Raises ApiError where two fields say it."""
        guided = [(f"guided_{name}", name, getattr(self, f"guided_{name}")) for name in CHECKS if name != "json_object"]
        given = [("response_format", "json", self.response_format), *guided]
        if self.structured_outputs is not None:
            given.append(("structured_outputs", *self.structured_outputs))
        return bound_by(given)

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
    prompt: tuple[str | tuple[int, ...], ...] = knob(
        Prompts(MOST_PROMPTS), (), "A text, token ids, or a list of either.", limit="max_prompts"
    )
    add_special_tokens: bool = knob(Flag(), True, "The tokenizer adds what it does by default, such as a BOS.")
    echo: bool = knob(Flag(), False, "The answer begins with the prompt.")
    logprobs: int | None = knob(
        Whole(0, MOST_LOGPROBS), None, "Log probabilities of each token and of so many likelier.", limit="max_logprobs"
    )
    best_of: int | None = knob(
        Whole(1, MOST_CHOICES), None, "Draws so many answers and keeps the n likeliest.", limit="max_choices"
    )
    suffix: None = knob(Unsupported(("",), "this model continues text and does not fill gaps"), None)
    prompt_embeds: None = knob(Unsupported((), "prompts are texts or token ids"), None)

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
    messages: tuple[dict[str, Any], ...] = needed(
        Many(Tree(MOST_CHARS, "object"), MOST_MESSAGES, least=1), "The conversation so far.", limit="max_messages"
    )
    max_completion_tokens: int | None = knob(Whole(1, INT32_MAX), None, "The newer name of max_tokens.")
    logprobs: bool = knob(Flag(), False, "Log probabilities of the answer's tokens.")
    top_logprobs: int | None = knob(
        Whole(0, MOST_LOGPROBS), None, "And of so many likeliest ones at each place.", limit="max_logprobs"
    )
    add_generation_prompt: bool | None = knob(Flag(), None, "The prompt ends with the beginning of an answer.")
    continue_final_message: bool = knob(Flag(), False, "The last message, an assistant's, is gone on with.")
    chat_template_kwargs: dict[str, Any] | None = knob(
        Tree(4096, "object"), None, "Variables for the model's chat template."
    )
    chat_template: None = knob(Unsupported((), "only the model's own template is used"), None)
    tools: tuple[Tool, ...] = knob(
        Many(ToolCheck(), MOST_TOOLS), (), "Functions that the model may call.", limit="max_tools"
    )
    tool_choice: ToolChoice | None = knob(
        ToolChoiceCheck(), None, "Whether the answer may call, may not, has to, or has to call this one."
    )
    parallel_tool_calls: bool = knob(Flag(), True, "Whether an answer may have several calls.")
    functions: None = knob(Unsupported(([],), "use tools"), None)
    function_call: None = knob(Unsupported(("none",), "use tool_choice"), None)
    modalities: None = knob(Unsupported((["text"],), "only text is produced"), None)
    audio: None = knob(Unsupported((), "only text is produced"), None)

    def __post_init__(self) -> None:
        super().__post_init__()
        toolbox = self.toolbox
        if (toolbox.must_be_called or toolbox.is_bound) and (self.beams is not None or self.ignore_eos):
            field = "ignore_eos" if self.ignore_eos else "tool_choice"
            why = "an answer that has to be a call, or whose calls are strict or not parallel, follows a grammar"
            raise bad_request(field, f"{field} cannot be had: {why}")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs wants logprobs: true")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise bad_request("max_tokens", "max_tokens must be at least 1, unless prompt_logprobs is asked for")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )

    @property
    def toolbox(self) -> Toolbox:
        """Raises ApiError."""
        return Toolbox.of(self.tools, self.tool_choice, self.parallel_tool_calls)


@dataclass(frozen=True, kw_only=True)
class PrefixRequest:
    """A name for a text, or for the messages that chats begin with."""

    name: str = needed(Words(64, least=1), "How it is called: letters, digits, dot, underscore, hyphen.")
    text: str | None = knob(Words(MOST_CHARS), None, "What prompts begin with.")
    messages: tuple[dict[str, Any], ...] | None = knob(
        Many(Tree(MOST_CHARS, "object"), MOST_MESSAGES, least=1), None, "What chats begin with.", limit="max_messages"
    )
    model: str = knob(Words(256), "", "The served model's name, or nothing.")
    public: bool = knob(Flag(), False, "For all tenants; wants an admin's key.")
    add_special_tokens: bool = knob(Flag(), True, "The tokenizer adds what it does by default.")
    allow_special_tokens: bool = knob(Flag(), False, "Control tokens written out in it count as such.")
    cache_salt: str = knob(Words(MOST_SALT_CHARS), "", "That of the requests which begin with it.")

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

    model: str = knob(Words(256), "", "The served model's name, or nothing.")
    prompt: str | None = knob(Words(MOST_CHARS), None, "A text.")
    messages: tuple[dict[str, Any], ...] | None = knob(
        Many(Tree(MOST_CHARS, "object"), MOST_MESSAGES, least=1), None, "Or a conversation.", limit="max_messages"
    )
    add_special_tokens: bool | None = knob(Flag(), None, "The tokenizer adds what it does by default.")
    add_generation_prompt: bool = knob(Flag(), True, "It ends with the beginning of an answer.")
    continue_final_message: bool = knob(Flag(), False, "It ends within the last message.")
    allow_special_tokens: bool = knob(Flag(), False, "Control tokens written out in it count as such.")
    return_token_strs: bool = knob(Flag(), False, "Each token's text, too.")

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("prompt", "give either prompt or messages")


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest:
    tokens: tuple[int, ...] = needed(Many(Whole(0, INT32_MAX), MOST_PROMPT_IDS), "Token ids.")
    model: str = knob(Words(256), "", "The served model's name, or nothing.")
