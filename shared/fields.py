"""How one value looks on the wire, and what is refused when it comes back.

A frame is read as a stream, in the order of the schema: a list is built only where the schema has one, entry by entry,
so that a hostile frame can make us allocate no more than a small multiple of its own size, whatever lengths it claims
and however deep it nests. (Unpacking it whole first would build 80 bytes of empty list from every byte 0x90, and room
for as many entries as a header cares to claim, at every depth.)

Numbers are what they say: a bool or a float is no integer, an integer is no float, and NaN is nothing. Records may grow
at their end only: entries beyond those we know are skipped, unread.
"""

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from struct import pack
from typing import Any, TypeVar

import msgpack

from kilburn.shared.digest import DIGEST_BYTES
from kilburn.shared.grammar import MOST_SOURCE_BYTES
from kilburn.shared.types import LawBroken, ProtocolError

MAX_FRAME_BYTES = 16 << 20
MAX_ITEMS = 1 << 20  # entries of any one column
MAX_RECORDS = 1 << 16  # entries of any one list of records
MAX_TEXT_BYTES = 4096
MAX_FIELDS = 64  # of a record or a message
INT32_MAX = 2**31 - 1

T = TypeVar("T")
Reader = Any  # msgpack.Unpacker, which carries no types


@dataclass(frozen=True, slots=True)
class Field:
    """One value on the wire. `load` raises ProtocolError, or one of msgpack's, on what `dump` would not have made."""

    dump: Callable[[Any], Any]
    load: Callable[[Reader], Any]


def reader(frame: bytes) -> Reader:
    """The frame as a stream of scalars. Lists are opened by `open_list` alone."""
    stream = msgpack.Unpacker(
        max_buffer_size=max(len(frame), 1),
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
        max_str_len=MAX_TEXT_BYTES,
        max_bin_len=4 * MAX_ITEMS,
    )
    stream.feed(frame)
    return stream


def open_list(stream: Reader, least: int, most: int, what: str) -> int:
    """The number of entries that the list claims, which the frame may yet fail to hold."""
    length = stream.read_array_header()
    if not least <= length <= most:
        raise ProtocolError(f"{what} of {length} entries, expected {least} to {most}")
    return int(length)


def skip(stream: Reader, count: int) -> None:
    for _ in range(count):
        stream.skip()


def _same(value: T) -> T:
    return value


def integer(low: int, high: int) -> Field:
    def load(stream: Reader) -> int:
        value = stream.unpack()
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"expected an integer in [{low}, {high}]")
        return value

    return Field(_same, load)


def _load_real(stream: Reader) -> float:
    value = stream.unpack()
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError("expected a finite float")
    return value


def _load_flag(stream: Reader) -> bool:
    value = stream.unpack()
    if type(value) is not bool:
        raise ProtocolError("expected true or false")
    return value


def _load_text(stream: Reader) -> str:
    value = stream.unpack()
    if type(value) is not str:
        raise ProtocolError("expected a text")
    return value


def clipped(value: str) -> str:
    """At most MAX_TEXT_BYTES bytes of UTF-8, never half a character, so that our own reasons always decode."""
    return value.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def _load_digest(stream: Reader) -> bytes:
    value = stream.unpack()
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise ProtocolError("expected a digest")
    return value


def _load_optional_digest(stream: Reader) -> bytes:
    value = stream.unpack()
    if type(value) is not bytes or len(value) not in (0, DIGEST_BYTES):
        raise ProtocolError("expected a digest, or nothing")
    return value


def _load_source(stream: Reader) -> bytes:
    value = stream.unpack()
    if type(value) is not bytes or len(value) > MOST_SOURCE_BYTES:
        raise ProtocolError("expected the source of a grammar")
    return value


def _pack(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    return pack(f"<{len(values)}{code}", *values)  # twice as fast as by way of an array


def _unpack(code: str, value: Any) -> "array[Any]":
    if type(value) is not bytes or len(value) % 4:
        raise ProtocolError("expected a packed column")
    column = array(code)
    column.frombytes(value)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _load_naturals(stream: Reader) -> list[int]:
    column = _unpack("i", stream.unpack()).tolist()
    if column and min(column) < 0:
        raise ProtocolError("negative entry in a column")
    return column


def _load_reals(stream: Reader) -> tuple[float, ...]:
    column = _unpack("f", stream.unpack())
    # The sum is NaN or +inf if an entry is. -inf is a log probability: that of a token that cannot come.
    total = sum(column)
    if math.isnan(total) or total == math.inf:
        raise ProtocolError("not a number in a column")
    return tuple(column)


def _dump_naturals(values: Sequence[int]) -> bytes:
    return _pack("i", values)


# Most advances of most plans compute one position and draw one token: a column of counts is sent up to its last entry
# that is not one, so that a plan of decodes carries none.


def _dump_counts(counts: Sequence[int]) -> bytes:
    end = len(counts)
    if counts.count(1) == end:  # a plan of decodes, at the speed of C
        return b""
    while counts[end - 1] == 1:
        end -= 1
    return _pack("i", counts[:end])


def pad_counts(counts: list[int], length: int) -> None:
    """Put back the ones at the end. The caller has made sure that the frame accounts for `length` of them."""
    if len(counts) > length:
        raise ProtocolError("more counts than advances")
    counts.extend([1] * (length - len(counts)))


def _dump_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return _pack("i", [x for pair in pairs for x in pair]) if pairs else b""


def _load_pairs(stream: Reader) -> list[tuple[int, int]]:
    flat = _load_naturals(stream)
    if len(flat) % 2:
        raise ProtocolError("odd column of pairs")
    return list(zip(flat[::2], flat[1::2], strict=True))


NATURAL = integer(0, INT32_MAX)
POSITIVE = integer(1, INT32_MAX)
COUNTER = integer(0, 2**63 - 1)
REAL = Field(float, _load_real)
FLAG = Field(bool, _load_flag)
TEXT = Field(clipped, _load_text)
DIGEST = Field(_same, _load_digest)
OPTIONAL_DIGEST = Field(_same, _load_optional_digest)
SOURCE = Field(_same, _load_source)
COLUMN = Field(_dump_naturals, _load_naturals)
TUPLE_COLUMN = Field(_dump_naturals, lambda stream: tuple(_load_naturals(stream)))
REALS = Field(lambda values: _pack("f", values), _load_reals)
COUNTS = Field(_dump_counts, _load_naturals)
PAIRS = Field(_dump_pairs, _load_pairs)


def listed(item: Field) -> Field:
    def load(stream: Reader) -> list[Any]:
        return [item.load(stream) for _ in range(open_list(stream, 0, MAX_RECORDS, "a list"))]

    return Field(lambda values: [item.dump(value) for value in values], load)


def tupled(item: Field) -> Field:
    whole = listed(item)
    return Field(whole.dump, lambda stream: tuple(whole.load(stream)))


def pair(first: Field, second: Field) -> Field:
    """Two entries, neither more nor less. A pair does not grow."""

    def load(stream: Reader) -> tuple[Any, Any]:
        open_list(stream, 2, 2, "a pair")
        return first.load(stream), second.load(stream)

    return Field(lambda value: [first.dump(value[0]), second.dump(value[1])], load)


def dumper(codecs: dict[str, Field]) -> Callable[[Any], list[Any]]:
    """Of an object's attributes, in order."""
    dumps = tuple([codec.dump for codec in codecs.values()])
    if len(dumps) == 1:  # attrgetter of one name gives the bare value
        (name, only) = next(iter(codecs)), dumps[0]
        return lambda value: [only(getattr(value, name))]
    get = attrgetter(*codecs)
    return lambda value: [dump(part) for dump, part in zip(dumps, get(value), strict=True)]


def record(cls: type, codecs: dict[str, Field], num_appended: int = 0) -> Field:
    """A dataclass inside a message: an array of its fields, in the order in which it declares them.

    `num_appended`: fields at the end, with defaults, that older builds of this version do not send.
    """
    check_complete(cls, list(codecs))
    loads = tuple([codec.load for codec in codecs.values()])
    num_fields, name = len(loads), cls.__name__

    def load(stream: Reader) -> Any:
        length = open_list(stream, num_fields - num_appended, MAX_FIELDS, name)
        value = cls(*[load(stream) for load in loads[:length]])
        if length > num_fields:
            skip(stream, length - num_fields)
        return value

    return Field(dumper(codecs), load)


def check_complete(cls: type, names: list[str]) -> None:
    declared = [f.name for f in fields(cls)]
    if declared != names:  # at import: a field that was forgotten never gets as far as a wire
        raise LawBroken(f"the wire has {names} for {cls.__name__}, which declares {declared}")
