"""Messages as bytes: one frame, a msgpack array [version, tag, fields...].

Each message is a row of a table: its tag, its class and a codec per field. A field codec turns a value into something
msgpack carries and checks whatever comes back, so that a frame either becomes a well-formed message or a
`ProtocolError`; nothing else comes out of `decode`, whatever goes in. Token and block lists are packed little-endian
int32 columns. Fields are only ever appended: extra ones at the end, from a newer peer, are ignored.

What this file does not know: whether a well-formed message makes sense. Row numbers, block ids and step numbers are
for the core and the worker to judge.
"""

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import error as struct_error
from typing import Any, TypeVar

import msgpack

from kilburn.shared import messages as m
from kilburn.shared.digest import DIGEST_BYTES
from kilburn.shared.layout import DTYPE_BYTES, KVLayout
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import ProtocolError, Tier

MAX_FRAME_BYTES = 16 << 20
MAX_ITEMS = 1 << 20  # entries of any one list or column
MAX_TEXT_BYTES = 4096
MAX_FIELDS = 64
INT32_MAX = 2**31 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field:
    """How one value looks on the wire. `load` raises ProtocolError on anything that `dump` would not have made."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def _same(value: T) -> T:
    return value


def _integer(low: int, high: int) -> Field:
    def load(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"expected an integer in [{low}, {high}]")
        return value

    return Field(_same, load)


def _real(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError("expected a finite float")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT_BYTES:
        raise ProtocolError("expected a short text")
    return value


def _clipped(value: str) -> str:
    """At most MAX_TEXT_BYTES bytes of UTF-8, never half a character, so that our own reasons always decode."""
    return value.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise ProtocolError("expected a digest")
    return value


def _pack(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    column = array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unpack(code: str, value: Any) -> "array[Any]":
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * MAX_ITEMS:
        raise ProtocolError("expected a packed column")
    column = array(code)
    column.frombytes(value)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _load_naturals(value: Any) -> list[int]:
    column = _unpack("i", value).tolist()
    if column and min(column) < 0:
        raise ProtocolError("negative entry in a column")
    return column


def _load_reals(value: Any) -> tuple[float, ...]:
    column = _unpack("f", value)
    # -inf is a log probability: that of a token that cannot come.
    if any(math.isnan(x) or x == math.inf for x in column):
        raise ProtocolError("not a number in a column")
    return tuple(column)


NATURAL = _integer(0, INT32_MAX)
POSITIVE = _integer(1, INT32_MAX)
COUNTER = _integer(0, 2**63 - 1)
SEED = _integer(0, 2**64 - 1)
LOGPROBS = _integer(-1, INT32_MAX)
REAL = Field(float, _real)
TEXT = Field(_clipped, _text)
DIGEST = Field(_same, _digest)
COLUMN = Field(lambda values: _pack("i", values), _load_naturals)
TUPLE_COLUMN = Field(COLUMN.dump, lambda value: tuple(_load_naturals(value)))
REALS = Field(lambda values: _pack("f", values), _load_reals)
TIER = Field(lambda tier: tier.value, lambda value: Tier(NATURAL.load(value)))


def _checked_list(value: Any, most: int = MAX_ITEMS) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise ProtocolError("expected a list")
    return value


def _pairs_dump(pairs: Sequence[tuple[int, int]]) -> bytes:
    return _pack("i", [x for pair in pairs for x in pair])


def _pairs_load(value: Any) -> list[tuple[int, int]]:
    flat = _load_naturals(value)
    if len(flat) % 2:
        raise ProtocolError("odd column of pairs")
    return list(zip(flat[::2], flat[1::2], strict=True))


PAIRS = Field(_pairs_dump, _pairs_load)


def _listed(item: Field) -> Field:
    return Field(lambda values: [item.dump(v) for v in values], lambda raw: [item.load(v) for v in _checked_list(raw)])


def _tupled(item: Field) -> Field:
    return Field(
        lambda values: [item.dump(v) for v in values], lambda raw: tuple([item.load(v) for v in _checked_list(raw)])
    )


def _record(cls: type, fields: dict[str, Field]) -> Field:
    """A dataclass inside a message: an array of its fields."""
    names, codecs = tuple(fields), tuple(fields.values())

    def dump(value: Any) -> list[Any]:
        return [codec.dump(getattr(value, name)) for name, codec in zip(names, codecs, strict=True)]

    def load(raw: Any) -> Any:
        items = _checked_list(raw, MAX_FIELDS)
        if len(items) < len(codecs):
            raise ProtocolError(f"{cls.__name__} lacks fields")
        return cls(**{name: codec.load(item) for name, codec, item in zip(names, codecs, items, strict=False)})

    return Field(dump, load)


def _bias_load(raw: Any) -> tuple[tuple[int, float], ...]:
    pairs = [_checked_list(pair, 2) for pair in _checked_list(raw, MAX_TEXT_BYTES)]
    if any(len(pair) != 2 for pair in pairs):
        raise ProtocolError("a bias is a pair")
    return tuple([(NATURAL.load(token), _real(bias)) for token, bias in pairs])


def _choose_load(raw: Any) -> Draws | Candidates:
    match _checked_list(raw, MAX_FIELDS):
        case [0, first, count, *_]:
            return Draws(NATURAL.load(first), POSITIVE.load(count))
        case [1, count, *_]:
            return Candidates(POSITIVE.load(count))
    raise ProtocolError("unknown way to choose")


def _choose_dump(choose: Draws | Candidates) -> list[int]:
    match choose:
        case Draws(first, count):
            return [0, first, count]
        case Candidates(count):
            return [1, count]


def _failed_load(raw: Any) -> dict[int, str]:
    entries = [_checked_list(pair, 2) for pair in _checked_list(raw)]
    if any(len(pair) != 2 for pair in entries):
        raise ProtocolError("a failure is an index and a reason")
    return {NATURAL.load(index): _text(reason) for index, reason in entries}


SAMPLING = _record(
    Sampling,
    {
        "temperature": REAL,
        "top_k": NATURAL,
        "top_p": REAL,
        "min_p": REAL,
        "presence_penalty": REAL,
        "frequency_penalty": REAL,
        "repetition_penalty": REAL,
        "logit_bias": Field(lambda bias: [[token, float(by)] for token, by in bias], _bias_load),
        "seed": SEED,
        "min_tokens": NATURAL,
        "stop_ids": TUPLE_COLUMN,
        "logprobs": LOGPROBS,
        "choose": Field(_choose_dump, _choose_load),
    },
)


def _dtype(value: Any) -> str:
    if value not in DTYPE_BYTES:
        raise ProtocolError("unknown dtype")
    return str(value)


LAYOUT = _record(
    KVLayout,
    {
        "block_size": _integer(1, 4096),
        "num_layers": _integer(1, 4096),
        "num_kv_heads": _integer(1, 65536),
        "head_dim": _integer(1, 65536),
        "dtype": Field(_same, _dtype),
        "scale_bytes": NATURAL,
    },
)

ADMIT = _record(
    m.Admit,
    {
        "row": NATURAL,
        "start": NATURAL,
        "num_prompt": NATURAL,
        "tokens": TUPLE_COLUMN,
        "history": TUPLE_COLUMN,
        "blocks": TUPLE_COLUMN,
        "sampling": SAMPLING,
    },
)

LOST = _record(m.KvLost, {"index": NATURAL, "tier": TIER, "block": NATURAL, "step": COUNTER})
LOGPROB_ROW = _record(m.RowLogprobs, {"index": NATURAL, "width": POSITIVE, "ids": TUPLE_COLUMN, "logprobs": REALS})
TIMINGS = _record(m.Timings, {"idle_s": REAL, "apply_s": REAL, "forward_s": REAL, "sample_s": REAL})

# Most advances of most plans compute one position and draw one token: a column of counts is sent up to its last entry
# that is not one, so that a plan of decodes carries none.


def _counts_dump(counts: Sequence[int]) -> bytes:
    end = len(counts)
    while end and counts[end - 1] == 1:
        end -= 1
    return _pack("i", counts[:end])


COUNTS = Field(_counts_dump, _load_naturals)


def _pad(counts: list[int], length: int, what: str) -> None:
    if len(counts) > length:
        raise ProtocolError(f"more {what} than advances")
    counts.extend([1] * (length - len(counts)))


def _check_plan(plan: m.StepPlan) -> m.StepPlan:
    _pad(plan.counts, len(plan.rows), "counts")
    if plan.counts and min(plan.counts) < 1:
        raise ProtocolError("an advance by nothing")
    if len(plan.grown_at) != len(plan.grown_blocks):
        raise ProtocolError("the columns of grown blocks differ in length")
    if plan.grown_at and max(plan.grown_at) >= len(plan.rows):
        raise ProtocolError("a block grown for no advance")
    return plan


def _result_load(fields: dict[str, Any]) -> m.StepResult:
    num_advances = fields.pop("num_advances")
    result = m.StepResult(**fields)
    _pad(result.num_tokens, num_advances, "draws")
    if sum(result.num_tokens) != len(result.tokens):
        raise ProtocolError("draws and tokens differ in number")
    indices = [*result.failed, *(lost.index for lost in result.lost), *(row.index for row in result.logprobs)]
    if indices and max(indices) >= num_advances:
        raise ProtocolError("an outcome for no advance")
    for row in result.logprobs:
        expected = row.width * result.num_tokens[row.index]
        if len(row.ids) != expected or len(row.logprobs) != expected:
            raise ProtocolError("log probabilities do not fit their tokens")
    return result


@dataclass(frozen=True, slots=True)
class _Kind:
    tag: int
    cls: type
    fields: dict[str, Field]
    build: Callable[[dict[str, Any]], Any]


def _kind(tag: int, cls: type, **fields: Field) -> _Kind:
    return _Kind(tag, cls, fields, lambda values: cls(**values))


LEASE, STEP = COUNTER, COUNTER
BEAT = _kind(3, m.Beat, lease=LEASE, step=STEP)

# fmt: off
_FROM_WORKER = (
    _kind(1, m.Hello, name=TEXT, model_digest=DIGEST, layout=LAYOUT, num_blocks=NATURAL, num_host_blocks=NATURAL,
          max_rows=POSITIVE, max_step_tokens=POSITIVE, max_len=POSITIVE, vocab_size=POSITIVE, rank=NATURAL,
          world=POSITIVE, pid=NATURAL),
    _Kind(2, m.StepResult,
          {"lease": LEASE, "step": STEP, "num_advances": NATURAL, "num_tokens": COUNTS, "tokens": COLUMN,
           "failed": Field(lambda failed: [[i, _clipped(why)] for i, why in failed.items()], _failed_load),
           "lost": _tupled(LOST), "logprobs": _tupled(LOGPROB_ROW), "timings": TIMINGS}, _result_load),
    BEAT,
    _kind(4, m.StepDone, lease=LEASE, step=STEP, digest=DIGEST),
    _kind(5, m.StepFailed, lease=LEASE, step=STEP, reason=TEXT),
    _kind(6, m.Goodbye, reason=TEXT),
)
_FROM_CONTROLLER = (
    _kind(32, m.Welcome, lease=LEASE, beat_s=REAL, silence_s=REAL, depth=POSITIVE, rendezvous=TEXT),
    _kind(33, m.Reject, reason=TEXT),
    _Kind(34, m.StepPlan,
          {"lease": LEASE, "step": STEP, "rows": COLUMN, "counts": COUNTS, "grown_at": COLUMN, "grown_blocks": COLUMN,
           "admits": _listed(ADMIT), "swaps_out": PAIRS, "copies": PAIRS, "swaps_in": PAIRS},
          lambda values: _check_plan(m.StepPlan(**values))),
    BEAT,
    _kind(35, m.Drain, lease=LEASE),
    _kind(36, m.Gone, lease=LEASE, reason=TEXT),
)
# fmt: on

_BY_CLASS = {kind.cls: kind for kind in (*_FROM_WORKER, *_FROM_CONTROLLER)}
_BY_TAG_FROM_WORKER = {kind.tag: kind for kind in _FROM_WORKER}
_BY_TAG_FROM_CONTROLLER = {kind.tag: kind for kind in _FROM_CONTROLLER}


def encode(message: m.Message) -> bytes:
    """The frame for a message."""
    kind = _BY_CLASS[type(message)]
    frame: list[Any] = [m.PROTOCOL_VERSION, kind.tag]
    for name, codec in kind.fields.items():
        value = len(message.num_tokens) if name == "num_advances" else getattr(message, name)  # type: ignore[union-attr]
        frame.append(codec.dump(value))
    return msgpack.packb(frame)  # type: ignore[no-any-return]


def decode_from_worker(frame: bytes) -> m.FromWorker:
    """What a worker sent. Raises ProtocolError."""
    return _decode(frame, _BY_TAG_FROM_WORKER)  # type: ignore[no-any-return]


def decode_from_controller(frame: bytes) -> m.FromController:
    """What the controller sent. Raises ProtocolError."""
    return _decode(frame, _BY_TAG_FROM_CONTROLLER)  # type: ignore[no-any-return]


def _decode(frame: bytes, by_tag: dict[int, _Kind]) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    try:
        # No maps and no extension types exist here, and no list can be longer than the frame that holds it.
        raw = msgpack.unpackb(
            frame,
            raw=False,
            max_array_len=min(len(frame), MAX_ITEMS),
            max_map_len=0,
            max_ext_len=0,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=4 * MAX_ITEMS,
        )
        items = _checked_list(raw)
        if len(items) < 2 or len(items) > MAX_FIELDS:
            raise ProtocolError("a frame without a head")
        version, tag, *values = items
        if version != m.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version!r}, expected {m.PROTOCOL_VERSION}")
        kind = by_tag.get(NATURAL.load(tag))
        if kind is None:
            raise ProtocolError(f"unknown tag {tag}")
        if len(values) < len(kind.fields):
            raise ProtocolError(f"{kind.cls.__name__} lacks fields")
        fields = {n: codec.load(v) for (n, codec), v in zip(kind.fields.items(), values, strict=False)}
        return kind.build(fields)
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, struct_error, msgpack.UnpackException) as error:
        # UnicodeDecodeError and msgpack's own errors are ValueErrors.
        raise ProtocolError(f"not a message: {type(error).__name__}") from error
