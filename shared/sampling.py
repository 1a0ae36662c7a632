"""How a row chooses its next token.

Everything that shapes a choice travels in one value, so that a row admitted a second time (after a preemption, a
death, a fork) chooses as the first would have: draws are keyed by (seed, stream, position), never by call order or
by who else is in the batch. `position` is that of the token being drawn; `stream` tells the samples of a group apart.
"""

from dataclasses import dataclass, field

LEAST_TEMPERATURE = 1e-5  # below it a draw can only be the likeliest token, or float32 overflows


@dataclass(frozen=True, slots=True)
class Draws:
    """Draw `count` tokens from one logits row, one from each of the streams [first_stream, first_stream + count).

    With count 1 the row feeds its own draw to its next Advance. With more, the group forks at commit and every
    sequence of it, the parent too, is admitted anew.
    """

    first_stream: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """Return the `count` most likely tokens, best first, with their log probabilities; the core chooses among them."""

    count: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The knobs, as OpenAI and vLLM name them. Validated at the edge; here only their neutral values are known."""

    temperature: float = 1.0  # below LEAST_TEMPERATURE: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over the generated tokens
    frequency_penalty: float = 0.0  # over the generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # unsigned 64 bits; the edge draws one where the client gave none
    min_tokens: int = 0  # until so many are generated, stop_ids cannot be drawn
    stop_ids: tuple[int, ...] = ()  # the core ends a sequence on these
    logprobs: int = -1  # how many of the likeliest tokens to report beside the chosen one; -1: no log probabilities
    choose: Draws | Candidates = field(default=Draws())
    prompt_logprobs: int = -1  # the same for each token of the prompt but the first; -1: none
    logprobs_are_processed: bool = False  # of the distribution that is drawn from; else of the model's own
    grammar: bytes = b""  # the digest of the one that the answer must follow; empty: none

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on which tokens came before, beyond what the KV cache says."""
        return self.is_penalised or bool(self.grammar)

    @property
    def is_penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
