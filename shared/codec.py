"""Messages as bytes: one frame, a msgpack array [version, tag, fields...].

Each message is a row of a table: its tag, its class and a codec per field, in the order in which the class declares
them. A frame either becomes a well-formed message or a `ProtocolError`; nothing else comes out of `decode`, whatever
goes in. Fields are only ever appended: extra ones at the end, from a newer peer, are skipped.

Two things are the same in every version, so that peers of different ones can part in good order: the head
`[version, tag`, and Reject, which is `[version, 33, reason]` in the version that the Hello spoke.

What this file does not know: whether a well-formed message makes sense. Row numbers, block ids and step numbers are
for the core and the worker to judge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from kilburn.shared import fields as f
from kilburn.shared import messages as m
from kilburn.shared.layout import DTYPE_BYTES, KVLayout
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import ProtocolError, Tier

MAX_FRAME_BYTES = f.MAX_FRAME_BYTES
MAX_BIASES = 4096
_HELLO_TAG, _REJECT_TAG = 1, 33


class WrongVersion(ProtocolError):
    """The frame's head is sound but its version is not ours; what follows the head was not read."""

    def __init__(self, version: int, tag: int) -> None:
        super().__init__(
            f"protocol version {version}, expected {m.PROTOCOL_VERSION}: install the same release here and there"
        )
        self.version = version
        self.is_hello = tag == _HELLO_TAG


# --- records inside messages


def _load_bias(stream: f.Reader) -> tuple[tuple[int, float], ...]:
    return tuple([_BIAS.load(stream) for _ in range(f.open_list(stream, 0, MAX_BIASES, "a list of biases"))])


def _dump_choose(choose: Draws | Candidates) -> list[int]:
    match choose:
        case Draws(first, count):
            return [0, first, count]
        case Candidates(count):
            return [1, count]


def _load_choose(stream: f.Reader) -> Draws | Candidates:
    length = f.open_list(stream, 2, f.MAX_FIELDS, "a way to choose")
    choose: Draws | Candidates
    match f.NATURAL.load(stream):
        case 0 if length >= 3:
            choose, num_read = Draws(f.NATURAL.load(stream), f.POSITIVE.load(stream)), 3
        case 1:
            choose, num_read = Candidates(f.POSITIVE.load(stream)), 2
        case _:
            raise ProtocolError("unknown way to choose")
    f.skip(stream, length - num_read)
    return choose


def _load_failed(stream: f.Reader) -> dict[int, str]:
    count = f.open_list(stream, 0, f.MAX_RECORDS, "a list of failures")
    failed: dict[int, str] = dict(_FAILURE.load(stream) for _ in range(count))
    if len(failed) != count:
        raise ProtocolError("an advance failed twice")
    return failed


def _load_dtype(stream: f.Reader) -> str:
    value: str = f.TEXT.load(stream)
    if value not in DTYPE_BYTES:
        raise ProtocolError("unknown dtype")
    return value


_BIAS = f.pair(f.NATURAL, f.REAL)
_FAILURE = f.pair(f.NATURAL, f.TEXT)
_FAILED = f.Field(lambda failed: [_FAILURE.dump(entry) for entry in failed.items()], _load_failed)
_TIER = f.Field(lambda tier: tier.value, lambda stream: Tier(f.NATURAL.load(stream)))

SAMPLING = f.record(
    Sampling,
    {
        "temperature": f.REAL,
        "top_k": f.NATURAL,
        "top_p": f.REAL,
        "min_p": f.REAL,
        "presence_penalty": f.REAL,
        "frequency_penalty": f.REAL,
        "repetition_penalty": f.REAL,
        "logit_bias": f.Field(lambda bias: [_BIAS.dump(entry) for entry in bias], _load_bias),
        "seed": f.integer(0, 2**64 - 1),
        "min_tokens": f.NATURAL,
        "stop_ids": f.TUPLE_COLUMN,
        "logprobs": f.integer(-1, f.INT32_MAX),
        "choose": f.Field(_dump_choose, _load_choose),
        "prompt_logprobs": f.integer(-1, f.INT32_MAX),
        "logprobs_are_processed": f.FLAG,
        "grammar": f.OPTIONAL_DIGEST,
    },
    num_appended=3,
)

LAYOUT = f.record(
    KVLayout,
    {
        "block_size": f.integer(1, 4096),
        "num_layers": f.integer(1, 4096),
        "num_kv_heads": f.integer(1, 65536),
        "head_dim": f.integer(1, 65536),
        "dtype": f.Field(str, _load_dtype),
        "scale_bytes": f.NATURAL,
    },
)

ADMIT = f.record(
    m.Admit,
    {
        "row": f.NATURAL,
        "start": f.NATURAL,
        "num_prompt": f.NATURAL,
        "tokens": f.TUPLE_COLUMN,
        "history": f.TUPLE_COLUMN,
        "blocks": f.TUPLE_COLUMN,
        "sampling": SAMPLING,
        "scored_from": f.NATURAL,
    },
    num_appended=1,
)

LOST = f.record(m.KvLost, {"index": f.NATURAL, "tier": _TIER, "block": f.NATURAL, "step": f.COUNTER})
LOGPROB_ROW = f.record(
    m.RowLogprobs, {"index": f.NATURAL, "width": f.POSITIVE, "ids": f.TUPLE_COLUMN, "logprobs": f.REALS}
)
PROMPT_ROW = f.record(
    m.PromptLogprobs,
    {
        "index": f.NATURAL,
        "start": f.POSITIVE,
        "width": f.POSITIVE,
        "ids": f.TUPLE_COLUMN,
        "logprobs": f.REALS,
        "ranks": f.TUPLE_COLUMN,
    },
)
MEMORY = f.record(m.WorkerMemory, dict.fromkeys(("weights", "activations", "logits", "buffers", "graphs"), f.COUNTER))
TIMINGS = f.record(m.Timings, dict.fromkeys(("idle_s", "apply_s", "forward_s", "sample_s", "moves_s"), f.REAL))


# --- messages whose fields must fit each other


def _plan(*values: Any) -> m.StepPlan:
    plan = m.StepPlan(*values)
    f.pad_counts(plan.counts, len(plan.rows))
    if plan.counts and min(plan.counts) < 1:
        raise ProtocolError("an advance by nothing")
    if len(plan.grown_at) != len(plan.grown_blocks):
        raise ProtocolError("the columns of grown blocks differ in length")
    if plan.grown_at and max(plan.grown_at) >= len(plan.rows):
        raise ProtocolError("a block grown for no advance")
    return plan


def _result(lease: int, step: int, num_advances: int, *values: Any) -> m.StepResult:
    result = m.StepResult(lease, step, *values)
    # Before any padding: the ones that were left out must all have their token in this frame.
    if sum(result.num_tokens) + num_advances - len(result.num_tokens) != len(result.tokens):
        raise ProtocolError("draws and tokens differ in number")
    f.pad_counts(result.num_tokens, num_advances)
    indices = [*result.failed, *[lost.index for lost in result.lost], *[row.index for row in result.logprobs]]
    indices += [scored.index for scored in result.prompt_logprobs]
    if indices and max(indices) >= num_advances:
        raise ProtocolError("an outcome for no advance")
    for row in result.logprobs:
        expected = row.width * result.num_tokens[row.index]
        if len(row.ids) != expected or len(row.logprobs) != expected:
            raise ProtocolError("log probabilities do not fit their tokens")
    for scored in result.prompt_logprobs:
        expected = scored.width * len(scored.ranks)
        if not scored.ranks or len(scored.ids) != expected or len(scored.logprobs) != expected:
            raise ProtocolError("log probabilities do not fit their positions")
    return result


_RESULT_HEAD = {"lease": f.COUNTER, "step": f.COUNTER}
_RESULT_TAIL = {
    "num_tokens": f.COUNTS,
    "tokens": f.COLUMN,
    "failed": _FAILED,
    "lost": f.tupled(LOST),
    "logprobs": f.tupled(LOGPROB_ROW),
    "timings": TIMINGS,
    "prompt_logprobs": f.tupled(PROMPT_ROW),
}


# --- the table


@dataclass(frozen=True, slots=True)
class _Kind:
    tag: int
    cls: type
    dump: Callable[[Any], list[Any]]
    loads: tuple[Callable[[f.Reader], Any], ...]
    build: Callable[..., Any]
    num_appended: int = 0  # fields at the end that older builds of this version do not send


def _kind(
    tag: int, cls: type, build: Callable[..., Any] | None = None, num_appended: int = 0, **codecs: f.Field
) -> _Kind:
    f.check_complete(cls, list(codecs))
    loads = tuple([codec.load for codec in codecs.values()])
    return _Kind(tag, cls, f.dumper(codecs), loads, build or cls, num_appended)


def _result_kind(tag: int) -> _Kind:
    """A result also carries how many advances it answers: its counts leave out the ones at their end."""
    f.check_complete(m.StepResult, [*_RESULT_HEAD, *_RESULT_TAIL])
    dump_tail = f.dumper(_RESULT_TAIL)
    codecs = [*_RESULT_HEAD.values(), f.NATURAL, *_RESULT_TAIL.values()]

    def dump(result: m.StepResult) -> list[Any]:
        return [result.lease, result.step, len(result.num_tokens), *dump_tail(result)]

    return _Kind(tag, m.StepResult, dump, tuple([codec.load for codec in codecs]), _result, num_appended=1)


LEASE, STEP = f.COUNTER, f.COUNTER
BEAT = _kind(3, m.Beat, lease=LEASE, step=STEP)

# fmt: off
_FROM_WORKER = (
    _kind(_HELLO_TAG, m.Hello, name=f.TEXT, model_digest=f.DIGEST, layout=LAYOUT, num_blocks=f.NATURAL,
          num_host_blocks=f.NATURAL, max_rows=f.POSITIVE, max_step_tokens=f.POSITIVE, max_len=f.POSITIVE,
          vocab_size=f.POSITIVE, rank=f.NATURAL, world=f.POSITIVE, pid=f.NATURAL, memory=MEMORY,
          rendezvous=f.TEXT, boot=f.TEXT, num_appended=3),
    _result_kind(2),
    BEAT,
    _kind(4, m.StepDone, lease=LEASE, step=STEP, digest=f.DIGEST),
    _kind(5, m.StepFailed, lease=LEASE, step=STEP, reason=f.TEXT),
    _kind(6, m.Goodbye, reason=f.TEXT),
    _kind(7, m.Prepared, lease=LEASE, number=f.COUNTER),
    _kind(8, m.Unpreparable, lease=LEASE, number=f.COUNTER, reason=f.TEXT),
)
_FROM_CONTROLLER = (
    _kind(32, m.Welcome, lease=LEASE, beat_s=f.REAL, silence_s=f.REAL, depth=f.POSITIVE, rendezvous=f.TEXT,
          step_s=f.REAL, num_appended=1),
    _kind(_REJECT_TAG, m.Reject, reason=f.TEXT),
    _kind(34, m.StepPlan, _plan, lease=LEASE, step=STEP, rows=f.COLUMN, counts=f.COUNTS, grown_at=f.COLUMN,
          grown_blocks=f.COLUMN, admits=f.listed(ADMIT), swaps_out=f.PAIRS, copies=f.PAIRS, swaps_in=f.PAIRS,
          allowed_s=f.REAL, num_appended=1),
    BEAT,
    _kind(35, m.Drain, lease=LEASE),
    _kind(36, m.Gone, lease=LEASE, reason=f.TEXT),
    _kind(37, m.Prepare, lease=LEASE, number=f.COUNTER, digest=f.DIGEST, source=f.SOURCE),
    _kind(38, m.Forget, lease=LEASE, digest=f.DIGEST),
)
# fmt: on

_BY_CLASS = {kind.cls: kind for kind in (*_FROM_WORKER, *_FROM_CONTROLLER)}
_BY_TAG_FROM_WORKER = {kind.tag: kind for kind in _FROM_WORKER}
_BY_TAG_FROM_CONTROLLER = {kind.tag: kind for kind in _FROM_CONTROLLER}


def encode(message: m.Message) -> bytes:
    """The frame for a message."""
    kind = _BY_CLASS[type(message)]
    return msgpack.packb([m.PROTOCOL_VERSION, kind.tag, *kind.dump(message)])  # type: ignore[no-any-return]


def encode_reject(reason: str, version: int) -> bytes:
    """A Reject that a peer of another version understands."""
    return msgpack.packb([version, _REJECT_TAG, f.clipped(reason)])  # type: ignore[no-any-return]


def decode_from_worker(frame: bytes) -> m.FromWorker:
    """What a worker sent. Raises ProtocolError, and no other error."""
    return _decode(frame, _BY_TAG_FROM_WORKER)  # type: ignore[no-any-return]


def decode_from_controller(frame: bytes) -> m.FromController:
    """What the controller sent. Raises ProtocolError, and no other error."""
    return _decode(frame, _BY_TAG_FROM_CONTROLLER)  # type: ignore[no-any-return]


def _decode(frame: bytes, by_tag: dict[int, _Kind]) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    try:
        return _read(f.reader(frame), len(frame), by_tag)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        # UnicodeDecodeError and msgpack's own errors are ValueErrors, but OutOfData: the frame ends too early.
        raise ProtocolError(f"not a message: {type(error).__name__}") from error


def _read(stream: f.Reader, num_bytes: int, by_tag: dict[int, _Kind]) -> Any:
    length = f.open_list(stream, 2, f.MAX_FIELDS, "a message")
    version, tag = f.NATURAL.load(stream), f.NATURAL.load(stream)
    if version != m.PROTOCOL_VERSION:
        raise WrongVersion(version, tag)
    kind = by_tag.get(tag)
    if kind is None:
        raise ProtocolError(f"unknown tag {tag}")
    num_extra = length - 2 - len(kind.loads)
    if num_extra < -kind.num_appended:
        raise ProtocolError(f"{kind.cls.__name__} lacks fields")
    values = [load(stream) for load in (kind.loads if num_extra >= 0 else kind.loads[:num_extra])]
    if num_extra > 0:
        f.skip(stream, num_extra)
    if stream.tell() != num_bytes:
        raise ProtocolError("bytes after the message")
    return kind.build(*values)
