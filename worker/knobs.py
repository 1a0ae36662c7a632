"""How each row chooses: its sampling parameters as columns, and the counts that penalties need.

    columns[rows]      one gather gives every parameter of the rows that sample, ready for vectorised arithmetic
    biases, stop_ids   lists differ in length, so they are kept by row, for the few rows that have them
    bound              where a row is in its grammar, for rows that follow one (grammars.py)
    seen               the tokens of a row and their counts, for rows with penalties: as many as the row has different
                       tokens, not as many as there are in the vocabulary

Presence and frequency look at generated tokens, repetition at prompt and generated ones. The counts begin with what
Admit tells and grow with what the row draws, so that a row admitted a second time counts as it did before.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.worker.grammars import Bound, Grammars, Masks
from kilburn.worker.outcomes import PlanBroken

COLUMNS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("repetition", np.float64),
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: all
        ("first_stream", np.int64),
        ("num_draws", np.int64),  # 0: candidates
        ("num_candidates", np.int64),  # 0: draws
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: none
        ("num_prompt", np.int64),
        ("prompt_logprobs", np.int64),  # -1: none
        ("is_greedy", np.bool_),
        ("is_penalised", np.bool_),
        ("is_shaped", np.bool_),  # something changes its logits before the choice
        ("is_processed", np.bool_),  # it reports of what it draws from, not of the model's own distribution
        ("is_plain", np.bool_),  # one draw: the likeliest token, and nothing else to do
    ],
    align=True,
)


def fault_of(sampling: Sampling, vocab_size: int) -> str | None:
    """What makes this request impossible on this model, if anything does. It fails one row, never a step."""
    beyond = [token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size]
    if beyond:
        return f"logit_bias names token {beyond[0]}, beyond the vocabulary of {vocab_size}"
    if sampling.repetition_penalty <= 0.0:
        return f"repetition_penalty is {sampling.repetition_penalty:g}; it must be above 0"
    if not sampling.temperature >= 0.0:
        return f"temperature is {sampling.temperature:g}; it must be 0 or more"
    if isinstance(sampling.choose, Candidates) and sampling.choose.count > vocab_size:
        return f"{sampling.choose.count} candidates of a vocabulary of {vocab_size}; ask for narrower beams"
    return None


@dataclass(slots=True)
class Seen:
    """Tokens of several rows, side by side. Entry i belongs to the row at place[i]."""

    place: NDArray[np.int64]
    tokens: NDArray[np.int64]
    generated: NDArray[np.int32]  # how often each was generated; 0: it stands in the prompt only


class SeenTokens:
    """The different tokens of one row, and how often it generated each."""

    __slots__ = ("_at", "_generated", "_tokens")

    def __init__(self, known: NDArray[np.int32], num_prompt: int) -> None:
        different, inverse = np.unique(known, return_inverse=True)
        self._tokens = different.astype(np.int64)
        self._generated = np.bincount(inverse[num_prompt:], minlength=len(different)).astype(np.int32)
        self._at = {token: i for i, token in enumerate(different.tolist())}

    def __len__(self) -> int:
        return len(self._at)

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self)]

    @property
    def generated(self) -> NDArray[np.int32]:
        return self._generated[: len(self)]

    def add(self, token: int) -> None:
        """The row generated this token."""
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
        self._tokens[at] = token
        self._generated[at] += 1


class Knobs:
    """Sampling state of up to `max_rows` rows."""

    def __init__(
        self, max_rows: int, vocab_size: int, grammars: Grammars | None = None, is_drawn_here: bool = True
    ) -> None:
        """`is_drawn_here`: false on ranks that are told what their rows drew; they follow no grammars."""
        self.vocab_size, self.grammars, self.is_drawn_here = vocab_size, grammars, is_drawn_here
        self.columns = np.zeros(max_rows, COLUMNS)
        self.feeds_itself = np.zeros(max_rows, np.bool_)  # its draw is its next token
        self.biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.stop_ids: dict[int, NDArray[np.int64]] = {}
        self.seen: dict[int, SeenTokens] = {}
        self.bound: dict[int, Bound] = {}  # rows that follow a grammar

    def clear(self) -> None:
        """No row is admitted any more."""
        self.biases.clear()
        self.stop_ids.clear()
        self.seen.clear()
        self.bound.clear()

    def set(self, row: int, sampling: Sampling, known: NDArray[np.int32], num_prompt: int) -> None:
        """A row begins a life. `known` are its last tokens: all of them, where sampling.needs_history.

        Raises PlanBroken for a grammar that is not here.
        """
        match sampling.choose:
            case Draws(first_stream, num_draws):
                num_candidates = 0
            case Candidates(num_candidates):
                first_stream, num_draws = 0, 0
        self.feeds_itself[row] = num_draws == 1
        self.seen.pop(row, None)
        if sampling.is_penalised:
            self.seen[row] = SeenTokens(known, num_prompt)
        # One token is left by both, and among equals the lowest id is as good as any.
        is_greedy = sampling.is_greedy or sampling.top_k == 1 or sampling.top_p <= 0.0
        stop_ids = [token for token in sampling.stop_ids if token < self.vocab_size]
        self.bound.pop(row, None)
        if sampling.grammar and self.is_drawn_here:
            self.bound[row] = self._own_grammars().compiled(sampling.grammar).at(known[num_prompt:].tolist(), stop_ids)
        waits = sampling.min_tokens > 0 and bool(stop_ids)
        is_shaped = sampling.needs_history or bool(sampling.logit_bias) or waits
        is_plain = is_greedy and not is_shaped and num_draws == 1 and sampling.logprobs < 0
        self.columns[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed,
            sampling.top_k,
            first_stream,
            num_draws,
            num_candidates,
            sampling.min_tokens,
            sampling.logprobs,
            num_prompt,
            sampling.prompt_logprobs,
            is_greedy,
            sampling.is_penalised,
            is_shaped,
            sampling.logprobs_are_processed,
            is_plain,
        )
        self.biases.pop(row, None)
        if sampling.logit_bias:
            ids, by = zip(*sampling.logit_bias, strict=True)
            self.biases[row] = np.array(ids, np.int64), np.array(by, np.float32)
        self.stop_ids.pop(row, None)
        if waits:
            self.stop_ids[row] = np.array(stop_ids, np.int64)

    def _own_grammars(self) -> Grammars:
        if self.grammars is None:
            raise PlanBroken("a row is admitted with a grammar, and nothing here can follow one")
        return self.grammars

    def masks(self, bounds: list[Bound]) -> Masks:
        """What the rows of these may draw by their grammars."""
        return self._own_grammars().masks(bounds)

    def count(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """These rows drew these tokens and go on from them."""
        if self.bound:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self.bound:
                    self.bound[row].follow(token)
        if self.seen:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self.seen:
                    self.seen[row].add(token)

    def seen_by(self, rows: NDArray[np.int64]) -> Seen:
        """What the rows, all of them with penalties, have seen."""
        of_rows = [self.seen[row] for row in rows.tolist()]
        return Seen(
            place=np.repeat(np.arange(len(of_rows)), [len(seen) for seen in of_rows]),
            tokens=np.concatenate([seen.tokens for seen in of_rows]),
            generated=np.concatenate([seen.generated for seen in of_rows]),
        )
