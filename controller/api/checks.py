"""From a JSON body to a typed request, in one place for every route.

    @dataclass
    class Completion:
        temperature: float = knob(Real(0.0, 2.0), 1.0)

A field's check says what is legal and turns the JSON value into the field's. Explicit nulls mean absent, unknown
fields are ignored, every text and list is bounded, NaN and Infinity are refused, and so are texts that are not
Unicode (halves of surrogate pairs). A fault names its field: `messages[2].content`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn, Protocol, TypeVar

from kilburn.controller.api.errors import ApiError, bad_request

T = TypeVar("T")
MOST_DEPTH = 32


class Check(Protocol):
    """Turns a JSON value into a field's value, or raises ApiError that names `where`."""

    def read(self, value: Any, where: str) -> Any: ...


def knob(check: Check, default: T) -> T:
    """A field that may be absent. Typed as its value, as `dataclasses.field` is."""
    declared: T = field(default=default, metadata={"check": check})
    return declared


def needed(check: Check) -> Any:
    """A field that must be there."""
    return field(metadata={"check": check})


def read_as(cls: type[T], value: Any, where: str = "") -> T:
    """An instance of a dataclass whose fields were made by `knob` and `needed`."""
    if not isinstance(value, dict):
        raise bad_request(where or None, f"{where or 'the body'} must be a JSON object")
    given: dict[str, Any] = {}
    for declared in fields(cls):  # type: ignore[arg-type]
        name = f"{where}.{declared.name}" if where else declared.name
        raw = value.get(declared.name)
        if raw is not None:
            given[declared.name] = declared.metadata["check"].read(raw, name)
        elif declared.default is MISSING:
            raise bad_request(name, f"{name} is missing")
    return cls(**given)


def read_json(body: bytes) -> Any:
    """The body as JSON. Raises ApiError."""
    try:
        value = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise bad_request(None, "the body is nested too deeply") from None
    except ValueError:  # UnicodeDecodeError and JSONDecodeError too
        raise bad_request(None, "the body is not valid JSON in UTF-8") from None
    return value


def _finite(written: str) -> float:
    value = float(written)
    return value if math.isfinite(value) else _no_constant(written)


def _no_constant(name: str) -> NoReturn:
    raise bad_request(None, f"{name[:40]} is not a number that can be used")


@dataclass(frozen=True, slots=True)
class Flag:
    def read(self, value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            raise bad_request(where, f"{where} must be true or false")
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in [low, high]. 3.0 is one, true is not."""

    low: int
    high: int

    def read(self, value: Any, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(where, f"{where} must be an integer")
        if not self.low <= value <= self.high:
            raise bad_request(where, f"{where} must be in [{self.low}, {self.high}]")
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in [low, high], or above `low` where `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def read(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_request(where, f"{where} must be a number")
        # Compared before it becomes a float: an integer may be too large to be one.
        inside = self.low <= value <= self.high and not (self.open_low and value == self.low)
        if not inside or not math.isfinite(value):
            interval = f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"
            raise bad_request(where, f"{where} must be a finite number in {interval}")
        return float(value)


@dataclass(frozen=True, slots=True)
class Words:
    """Text of at most `most` characters."""

    most: int
    least: int = 0

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise bad_request(where, f"{where} must be a string")
        if not self.least <= len(value) <= self.most:
            raise bad_request(where, f"{where} must have {self.least} to {self.most} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_request(where, f"{where} is not valid Unicode: it holds half of a surrogate pair") from None
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: Any, where: str) -> str:
        if value not in self.words or not isinstance(value, str):
            raise bad_request(where, f"{where} must be one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True, slots=True)
class Many:
    """A list of `least` to `most` of the same, as a tuple."""

    of: Check
    most: int
    least: int = 0

    def read(self, value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise bad_request(where, f"{where} must be a list")
        if not self.least <= len(value) <= self.most:
            raise bad_request(where, f"{where} must have {self.least} to {self.most} entries")
        return tuple([self.of.read(item, f"{where}[{i}]") for i, item in enumerate(value)])


@dataclass(frozen=True, slots=True)
class Entry:
    """An object with its own fields."""

    cls: type

    def read(self, value: Any, where: str) -> Any:
        return read_as(self.cls, value, where)


@dataclass(frozen=True, slots=True)
class Tree:
    """Any JSON value, bounded in size and depth: what only a template looks into."""

    most: int  # values and characters in all

    def read(self, value: Any, where: str) -> Any:
        self._measure(value, where, 0, [self.most])
        return value

    def _measure(self, value: Any, where: str, depth: int, left: list[int]) -> None:
        left[0] -= 1
        if isinstance(value, str):
            left[0] -= len(value)
            Words(self.most).read(value, where)
        if isinstance(value, float) and not math.isfinite(value):
            raise bad_request(where, f"{where} holds a number that is not finite")
        if left[0] < 0 or depth > MOST_DEPTH:
            raise bad_request(where, f"{where} is too large or nested too deeply")
        if isinstance(value, Mapping):
            for key, item in value.items():
                self._measure(key, where, depth + 1, left)
                self._measure(item, where, depth + 1, left)
        elif isinstance(value, list):
            for item in value:
                self._measure(item, where, depth + 1, left)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is understood and refused, unless it has a value that asks for nothing."""

    neutral: tuple[Any, ...]
    instead: str

    def read(self, value: Any, where: str) -> None:
        if not any(type(value) is type(same) and value == same for same in self.neutral):
            raise ApiError(400, f"{where} is not supported; {self.instead}", param=where, code="unsupported_parameter")
