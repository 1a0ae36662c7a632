"""From a validated request to what is asked of the streams: token ids, sampling, a number of tokens that fits.

Lengths, with `room` the tokens that fit behind the prompt into the model's length and the largest pool:

    max_tokens not given    completions 16, chat as many as there is room for; cut to the room
    max_tokens given        refused if it exceeds the room, as OpenAI and vLLM do
    no room at all          refused, unless max_tokens is 0
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kilburn.controller.api.errors import ApiError, bad_request
from kilburn.controller.api.schema import ChatRequest, Choosing, CompletionRequest
from kilburn.controller.auth import Tenant
from kilburn.controller.calls.forms import Form
from kilburn.controller.choice import Ask
from kilburn.controller.core.limits import Patience
from kilburn.controller.grammars import GrammarDoor, GrammarRefused, Wanted
from kilburn.controller.salts import Salts
from kilburn.controller.text import Text
from kilburn.shared.grammar import Grammar
from kilburn.shared.sampling import Sampling

DEFAULT_COMPLETION = 16  # OpenAI's
MOST_CANDIDATES = 1024  # of one beam in one step


class Capacity(Protocol):
    """What is known of the workers."""

    @property
    def vocab_size(self) -> int: ...

    async def room_for(self, num_prompt: int, n: int, patience: Patience) -> int:
        """The most tokens that an answer can have. Waits for a worker; raises ApiError where none comes.

        The wait is within `patience`, and is taken off it.
        """


@dataclass(frozen=True, slots=True)
class Asking:
    """What it takes to make an Ask of a request."""

    text: Text
    capacity: Capacity
    salts: Salts
    max_choices: int  # sequences that one request may ask for
    least_priority: int = 0  # the most urgent that one may have
    max_prompt_logprobs: int = 1 << 18  # log probabilities of prompts that one answer may tell
    max_prompt_tokens: int = 0  # of one prompt; 0: as many as the model takes
    grammars: GrammarDoor = field(default_factory=GrammarDoor)
    form: Form | None = None  # in which the model writes calls of tools


def sampling_of(request: Choosing, text: Text, vocab_size: int, num_logprobs: int) -> Sampling:
    """Raises ApiError for ids that the model does not have."""
    for id, _ in request.logit_bias:
        if id >= vocab_size:
            raise bad_request("logit_bias", f"logit_bias: this model has no token {id}; ids go to {vocab_size - 1}")
    for id in request.stop_token_ids:
        if id >= vocab_size:
            raise bad_request("stop_token_ids", f"stop_token_ids: this model has no token {id}")
    eos = () if request.ignore_eos else text.eos_ids
    seed = request.seed if request.seed is not None else secrets.randbits(64)
    return Sampling(
        temperature=request.temperature,
        top_k=max(request.top_k, 0),
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        seed=seed % 2**64,
        min_tokens=request.min_tokens,
        stop_ids=tuple(dict.fromkeys([*eos, *request.stop_token_ids])),
        logprobs=num_logprobs,
        prompt_logprobs=_num_prompt_logprobs(request),
        logprobs_are_processed=request.logprobs_mode == "processed_logprobs",
    )


def _num_prompt_logprobs(request: Choosing) -> int:
    """How many of the likeliest tokens are wanted for each token of the prompt; -1: no log probabilities of it."""
    wanted = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        wanted = max(wanted, request.logprobs)
    return wanted


def _bound_scores(request: Choosing, num_tokens: int, asking: Asking) -> None:
    """Raises ApiError where an answer would tell too much of prompts, of `num_tokens` in all."""
    each = 1 + _num_prompt_logprobs(request)
    num_told, most = num_tokens * each * request.n, asking.max_prompt_logprobs
    if each and num_told > most:
        field = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        raise bad_request(
            field,
            f"{field}: {num_tokens} tokens of prompts with {each} log probabilities each, told {request.n} times, are "
            f"{num_told}, and an answer may have at most {most} (--max-prompt-logprobs); lower {field}, or n, or "
            "shorten the prompt",
        )


async def fitted(
    request: Choosing, wanted: int | None, default: int | None, num_prompt: int, asking: Asking, patience: Patience
) -> int:
    """max_tokens of one prompt, by the rules at this file's head. Raises ApiError."""
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if num_prompt == 0:
        raise bad_request(field, f"{field}: this is a prompt of no tokens; give at least one")
    if 0 < asking.max_prompt_tokens < num_prompt:
        message = f"{field}: this prompt has {num_prompt} tokens; at most {asking.max_prompt_tokens} are taken here"
        raise bad_request(field, message, "context_length_exceeded")
    room = await asking.capacity.room_for(num_prompt, request.width, patience)
    if room < (0 if wanted == 0 else 1):
        raise bad_request(
            field,
            f"the prompt has {num_prompt} tokens, which leaves no room for an answer; at most "
            f"{max(num_prompt + room - 1, 0)} fit",
            "context_length_exceeded",
        )
    if wanted is not None and wanted > room:
        raise bad_request(
            "max_tokens",
            f"the prompt has {num_prompt} tokens and max_tokens is {wanted}; at most {room} fit behind it",
            "context_length_exceeded",
        )
    max_tokens = wanted if wanted is not None else min(room, default if default is not None else room)
    if request.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"min_tokens must not exceed max_tokens, which is {max_tokens}")
    return max_tokens


def bound(request: Choosing, num_prompts: int, asking: Asking) -> None:
    """Raises ApiError where the request asks for too much, before anything is made for it."""
    most, least = asking.max_choices, asking.least_priority
    if request.priority < least:
        raise bad_request("priority", f"priority must be at least {least} here (--least-priority); lower runs first")
    if request.width * num_prompts <= most:
        return
    field = "n"
    if request.width > request.n:
        field = "best_of" if request.beams is None else "beam_width"
    times = f" times {num_prompts} prompts" if num_prompts > 1 else ""
    raise bad_request(field, f"{field} is {request.width}{times}, and a request may have at most {most} sequences")


def _bound_candidates(request: Choosing, sampling: Sampling, vocab_size: int) -> None:
    if request.beams is None:
        return
    most = min(vocab_size, MOST_CANDIDATES)
    if (1 + max(1, len(sampling.stop_ids))) * request.beams.width > most:
        raise bad_request("beam_width", f"beam_width times the stop ids, and one, must be at most {most}; lower either")


async def _grammar(wanted: Wanted | None, sampling: Sampling, asking: Asking) -> Grammar | None:
    """What the answer has to follow. Raises ApiError."""
    if wanted is None:
        return None
    if not sampling.stop_ids:
        message = f"{wanted.where}: this model has no token that ends an answer; give stop_token_ids"
        raise bad_request(wanted.where, message)
    try:
        return await asking.grammars.grammar(wanted)
    except GrammarRefused as refused:
        raise bad_request(
            wanted.where, f"{wanted.where} cannot be followed: {refused}", "unsupported_grammar"
        ) from None


def _ask(
    request: Choosing,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    grammar: Grammar | None,
    salt: bytes,
    tenant: Tenant,
    patience: Patience,
    prefix: str = "",
) -> Ask:
    return Ask(
        prompt,
        max_tokens,
        sampling if grammar is None else replace(sampling, grammar=grammar.digest),
        grammar=grammar,
        n=request.n if request.beams is not None else request.width,
        keep=request.n,
        beams=request.beams,
        priority=request.priority,
        tenant=tenant.name.encode(),
        weight=tenant.weight,
        queue_s=patience.queue_s,
        request_s=patience.request_s,
        salt=salt,
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special=request.skip_special_tokens,
        prefix=prefix,
    )


async def completion_asks(request: CompletionRequest, asking: Asking, tenant: Tenant) -> list[Ask]:
    """One for each prompt. Raises ApiError."""
    text, capacity = asking.text, asking.capacity
    bound(request, len(request.prompt), asking)
    num_logprobs = request.logprobs if request.logprobs is not None else -1
    if request.beams is None and request.width > request.n:
        num_logprobs = max(num_logprobs, 0)  # the best are told by them
    salt = asking.salts.of(tenant.name, request.cache_salt)
    sampling = sampling_of(request, text, capacity.vocab_size, num_logprobs)
    _bound_candidates(request, sampling, capacity.vocab_size)
    grammar = await _grammar(request.bound_by, sampling, asking)
    prompts = await _prompt_ids(request, text, capacity)
    _bound_scores(request, sum(map(len, prompts)), asking)
    patience = Patience(request.queue_timeout, request.timeout)
    fits = [await fitted(request, request.max_tokens, DEFAULT_COMPLETION, len(p), asking, patience) for p in prompts]
    asks: list[Ask] = []
    for prompt, ids, max_tokens in zip(request.prompt, prompts, fits, strict=True):
        prefix = ""
        if request.echo:
            prefix = prompt if isinstance(prompt, str) else text.decode(ids, request.skip_special_tokens)
        asks.append(_ask(request, ids, max_tokens, sampling, grammar, salt, tenant, patience, prefix))
    return asks


async def _prompt_ids(request: CompletionRequest, text: Text, capacity: Capacity) -> list[Sequence[int]]:
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    encoded = iter(
        await text.encode(texts, add_special=request.add_special_tokens, trusted=request.allow_special_tokens)
        if texts
        else []
    )
    found: list[Sequence[int]] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            found.append(next(encoded))
            continue
        beyond = [id for id in prompt if id >= capacity.vocab_size]
        if beyond:
            raise bad_request("prompt", f"prompt: this model has no token {beyond[0]}")
        found.append(prompt)
    return found


async def chat_ask(request: ChatRequest, ids: Sequence[int], asking: Asking, tenant: Tenant) -> Ask:
    """Raises ApiError."""
    text, capacity = asking.text, asking.capacity
    bound(request, 1, asking)
    _bound_scores(request, len(ids), asking)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    sampling = sampling_of(request, text, capacity.vocab_size, num_logprobs)
    _bound_candidates(request, sampling, capacity.vocab_size)
    wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    patience = Patience(request.queue_timeout, request.timeout)
    toolbox, form = request.toolbox, asking.form
    grammar = await _grammar(request.bound_by, sampling, asking)  # first, so that what is wrong with it names its field
    if form is not None:
        grammar = await _grammar(toolbox.wanted(form, text.control_ids, request.bound_by), sampling, asking)
    max_tokens = await fitted(request, wanted, None, len(ids), asking, patience)
    salt = asking.salts.of(tenant.name, request.cache_salt)
    ask = _ask(request, ids, max_tokens, sampling, grammar, salt, tenant, patience)
    # What calls begin with is a control token in some forms, and must be seen to be read.
    return replace(ask, skip_special=False) if toolbox.may_be_called else ask


def no_worker(recovery_s: float) -> ApiError:
    return ApiError(503, f"no worker is ready, and none came within {recovery_s:g} s", code="no_worker")


def queue_full(num_waiting: int) -> ApiError:
    return ApiError(429, f"{num_waiting} requests are waiting; try again later", code="queue_full")
