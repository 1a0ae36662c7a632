"""Grammars on a worker: compiled beside the steps, and one matcher for each row that is bound by one.

    Prepare --> a thread of its own compiles --> held --Prepared-->     while held, rows may be admitted with it
    Forget  --> kept, in case it is wanted again: a cache, bounded in bytes, the least recently used goes first
    Admit   --> a copy of the matcher, taken through what the row has generated --> Bound

The compiler lets go of the interpreter's lock, so that steps go on meanwhile. What a grammar may cost is bounded by
LIMITS, when it is compiled and in each mask; one that goes beyond fails, and in a mask fails its row alone.

A stop id ends an answer, so it can be drawn where the grammar allows the end, and only there.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from kilburn.shared.messages import Forget, Prepare, Prepared, Unpreparable
from kilburn.worker.outcomes import PlanBroken

log = logging.getLogger("kilburn.worker")
Answer = Callable[[Prepared | Unpreparable], None]

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
MOST_KEPT_BYTES = 64 << 20
BYTES_EACH = 64 << 10  # of a compiled grammar, by measurement well below; and per byte of its source
BYTES_PER_SOURCE_BYTE = 32
FEW = 16  # masks that are quicker made one after the other


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: LLMatcher
    end_id: int  # the library's own id of the end

    def at(self, generated: Sequence[int], stop_ids: Sequence[int]) -> "Bound":
        """For a row that has generated these tokens."""
        matcher = self.matcher.deep_copy()
        if len(generated):
            matcher.consume_tokens(list(generated))
        return Bound(matcher, np.array(stop_ids, np.int64), self.end_id)


class Bound:
    """Where a row is in its grammar."""

    __slots__ = ("end_id", "is_over", "matcher", "stop_ids")

    def __init__(self, matcher: LLMatcher, stop_ids: NDArray[np.int64], end_id: int) -> None:
        self.matcher, self.stop_ids, self.end_id = matcher, stop_ids, end_id
        self.is_over = False  # it has drawn a stop id; what else it draws is thrown away

    def follow(self, token: int) -> None:
        """The row drew this token and goes on from it."""
        if token in self.stop_ids:
            self.is_over = True
        elif not self.is_over:
            self.matcher.consume_token(token)

    def with_end(self, allowed: NDArray[np.bool_]) -> bool:
        """Stop ids join what the grammar allows, where it allows the end. True: it allows nothing else."""
        if self.is_over:
            allowed[:] = True
            return False
        allowed[self.end_id] = False
        allowed[self.stop_ids] = False
        if self.matcher.is_error() or not self.matcher.is_accepting():
            return False
        must_end = not allowed.any()
        allowed[self.stop_ids] = True
        return must_end

    @property
    def failure(self) -> str:
        """Why no mask can be made; empty: it can."""
        error = self.matcher.get_error() if self.matcher.is_error() else ""
        return f"the grammar cannot be followed any further: {error.partition(chr(10))[0]}" if error else ""


@dataclass(frozen=True, slots=True)
class Masks:
    """What rows may draw."""

    allowed: NDArray[np.bool_]  # [rows, vocabulary]
    only_ends: NDArray[np.bool_]  # [rows] whether the grammar allows nothing but the end


class Grammars:
    """The grammars of one worker. `prepare` and what it starts may run beside everything else."""

    def __init__(self, tokenizer: Path, vocab_size: int, most_kept_bytes: int = MOST_KEPT_BYTES) -> None:
        self._file, self._vocab_size, self._most_kept_bytes = tokenizer, vocab_size, most_kept_bytes
        self._tokenizer: tuple[LLTokenizer, int] | None = None
        self._lock = threading.Lock()
        self._wanted: set[bytes] = set()  # digests: held, or being compiled
        self._compiled: OrderedDict[bytes, tuple[Compiled, int]] = OrderedDict()  # with their bytes
        self._thread = ThreadPoolExecutor(1, "kilburn-grammar")
        self._executor: LLExecutor | None = None  # its threads are made when they are first needed

    def prepare(self, asked: Prepare, answer: Answer) -> None:
        """Answers at once where the grammar is here, else when it is compiled."""
        with self._lock:
            self._wanted.add(asked.digest)
            is_here = asked.digest in self._compiled
            if is_here:
                self._compiled.move_to_end(asked.digest)
        if is_here:
            answer(Prepared(asked.lease, asked.number))
        else:
            self._thread.submit(self._compile, asked, answer)

    def forget(self, forgotten: Forget) -> None:
        with self._lock:
            self._wanted.discard(forgotten.digest)
            self._make_room()

    def clear(self) -> None:
        """The lease is over: nothing is held."""
        with self._lock:
            self._wanted.clear()
            self._make_room()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def compiled(self, digest: bytes) -> Compiled:
        """Raises PlanBroken for one that is not held."""
        with self._lock:
            if digest not in self._wanted or digest not in self._compiled:
                raise PlanBroken("a row is admitted with a grammar that was not prepared")
            return self._compiled[digest][0]

    def masks(self, bounds: Sequence[Bound]) -> Masks:
        """Whose matcher is in error may draw nothing, and says why in `failure`."""
        bits = np.zeros((len(bounds), (self._vocab_size + 31) // 32), np.int32)
        going = [
            (bound.matcher, i) for i, bound in enumerate(bounds) if not (bound.is_over or bound.matcher.is_error())
        ]
        if len(going) > FEW:
            if self._executor is None:
                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(going, bits.ctypes.data, 4 * bits.shape[1], len(bounds))
        else:
            for matcher, i in going:
                matcher.unsafe_compute_mask_ptr(bits[i].ctypes.data, 4 * bits.shape[1])
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size].astype(np.bool_)
        only_ends = np.zeros(len(bounds), np.bool_)
        for i, bound in enumerate(bounds):
            only_ends[i] = bound.with_end(allowed[i])
        return Masks(allowed, only_ends)

    @property
    def num_bytes(self) -> int:
        """Of all that are compiled, by the estimate that the bound goes by."""
        return sum(num_bytes for _, num_bytes in self._compiled.values())

    def _make_room(self) -> None:
        unneeded = [digest for digest in self._compiled if digest not in self._wanted]
        for digest in unneeded:
            if self.num_bytes <= self._most_kept_bytes:
                return
            del self._compiled[digest]

    # --- on the thread

    def _compile(self, asked: Prepare, answer: Answer) -> None:
        with self._lock:
            is_here = asked.digest in self._compiled  # asked for twice
        if is_here:
            answer(Prepared(asked.lease, asked.number))
            return
        try:
            compiled = self._made(asked.source.decode())
        except (ValueError, OSError) as error:
            answer(Unpreparable(asked.lease, asked.number, str(error).partition("\n")[0]))
        except Exception:
            log.exception("a grammar could not be compiled")
            answer(Unpreparable(asked.lease, asked.number, "the compiler failed"))
        else:
            with self._lock:
                num_bytes = BYTES_EACH + BYTES_PER_SOURCE_BYTE * len(asked.source)
                self._compiled[asked.digest] = compiled, num_bytes
                self._make_room()
            answer(Prepared(asked.lease, asked.number))

    def _made(self, source: str) -> Compiled:
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._file, self._vocab_size)
        tokenizer, end_id = self._tokenizer
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error() or "no reason")
        return Compiled(matcher, end_id)


def read_tokenizer(file: Path, vocab_size: int) -> tuple[LLTokenizer, int]:
    """The model's tokens as the library has them, and the id that it takes for the end. Raises ValueError, OSError.

    Which ids end an answer is each request's own (Bound.stop_ids); the library wants one, and any control token will
    do, since no grammar has it as a text.
    """
    if not file.is_file():
        raise ValueError(f"the model has no {file.name}, so that no grammar can be followed")
    source = file.read_text(encoding="utf-8")
    controls = [token["id"] for token in json.loads(source).get("added_tokens", ()) if token.get("special")]
    if not controls:
        raise ValueError(f"{file.name} has no control tokens, so that no answer could end")
    tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=controls[0])
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(f"{file.name} has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    return tokenizer, controls[0]
