"""From a JSON body to a typed request, in one place for every route.

    @dataclass
    class Completion:
        temperature: float = knob(Real(0.0, 2.0), 1.0, "0 takes the likeliest token always")
        stop: tuple[str, ...] = knob(StopTexts(), (), limit="max_stops")

A field's check says what is legal, turns the JSON value into the field's, and writes itself down as JSON Schema: what
is documented is what is checked. `limit` names a setting that may allow less than the check does.

Explicit nulls mean absent, unknown fields are ignored (and told), every text and list is bounded, NaN and Infinity are
refused, and so are texts that are not Unicode (halves of surrogate pairs). A fault names its field:
`messages[2].content`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar, cast

from kilburn.controller.api.errors import ApiError, bad_request

T = TypeVar("T")
MOST_DEPTH = 32


JsonSchema = dict[str, Any]
Limits = Mapping[str, int]  # name of a setting -> its value
NONE: Limits = MappingProxyType({})


class Check(Protocol):
    def read(self, value: Any, where: str) -> Any:
        """Turns a JSON value into a field's value, or raises ApiError that names `where`."""

    def schema(self) -> JsonSchema:
        """What is legal, in the words of JSON Schema."""


class Bounded(Check, Protocol):
    """A check of which a setting may allow less."""

    @property
    def most(self) -> int: ...


def knob(check: Check, default: T, about: str = "", *, limit: str = "") -> T:
    """A field that may be absent. Typed as its value, as `dataclasses.field` is."""
    declared: T = field(default=default, metadata={"check": check, "about": about, "limit": limit})
    return declared


def needed(check: Check, about: str = "", *, limit: str = "") -> Any:
    """A field that must be there."""
    return field(metadata={"check": check, "about": about, "limit": limit})


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of a request."""

    name: str
    check: Check
    about: str
    default: Any  # MISSING: it must be there


def declared(cls: type, limits: Limits = NONE) -> Iterator[Declared]:
    """The fields of a request, as this server allows them."""
    for one in fields(cls):
        check: Check = one.metadata["check"]
        if (most := limits.get(one.metadata["limit"])) is not None:
            bounded = cast(Any, check)  # that is a Bounded, and a dataclass
            check = replace(bounded, most=min(bounded.most, most))
        yield Declared(one.name, check, one.metadata["about"], one.default)


def read_as(cls: type[T], value: Any, where: str = "", limits: Limits = NONE) -> T:
    """An instance of a dataclass whose fields were made by `knob` and `needed`."""
    if not isinstance(value, dict):
        raise bad_request(where or None, f"{where or 'the body'} must be a JSON object")
    given: dict[str, Any] = {}
    for one in declared(cls, limits):
        name = f"{where}.{one.name}" if where else one.name
        raw = value.get(one.name)
        if raw is not None:
            given[one.name] = one.check.read(raw, name)
        elif one.default is MISSING:
            raise bad_request(name, f"{name} is missing")
    return cls(**given)


def unknown_fields(cls: type, value: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The names in a body that nobody will read."""
    known = {one.name: one.check for one in declared(cls)}
    for name, item in value.items():
        check = known.get(name)
        if check is None:
            yield where + name
        elif isinstance(check, Entry) and isinstance(item, dict):
            yield from unknown_fields(check.cls, item, f"{where}{name}.")


def schema_of(cls: type, limits: Limits = NONE) -> JsonSchema:
    """A request as JSON Schema."""
    properties: dict[str, JsonSchema] = {}
    for one in declared(cls, limits):
        schema = one.check.schema()
        if one.default is not MISSING:
            schema = _or_null(schema)
        properties[one.name] = schema | ({"description": one.about} if one.about else {})
    must = [one.name for one in declared(cls) if one.default is MISSING]
    return {"type": "object", "properties": properties, **({"required": must} if must else {}), **_doc(cls)}


def _doc(cls: type) -> JsonSchema:
    own = cls.__doc__ or ""
    is_made = own.startswith(f"{cls.__name__}(")  # by dataclasses, where there is none
    return {} if is_made or not own else {"description": " ".join(own.split())}


def _or_null(schema: JsonSchema) -> JsonSchema:
    """An explicit null is as good as nothing."""
    match schema:
        case {"type": str(kind)}:
            return schema | {"type": [kind, "null"]}
        case {"enum": list()}:
            return schema
        case {"anyOf": list(kinds)}:
            return schema | {"anyOf": [*kinds, {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


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

    def schema(self) -> JsonSchema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in [low, most]. 3.0 is one, true is not."""

    low: int
    most: int

    def read(self, value: Any, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(where, f"{where} must be an integer")
        if not self.low <= value <= self.most:
            raise bad_request(where, f"{where} must be in [{self.low}, {self.most}]")
        return value

    def schema(self) -> JsonSchema:
        return {"type": "integer", "minimum": self.low, "maximum": self.most}


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

    def schema(self) -> JsonSchema:
        return {"type": "number", "exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


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

    def schema(self) -> JsonSchema:
        return {"type": "string", **({"minLength": self.least} if self.least else {}), "maxLength": self.most}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, value: Any, where: str) -> str:
        if value not in self.words or not isinstance(value, str):
            raise bad_request(where, f"{where} must be one of {', '.join(self.words)}")
        return value

    def schema(self) -> JsonSchema:
        return {"enum": [*self.words, None]}


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

    def schema(self) -> JsonSchema:
        least = {"minItems": self.least} if self.least else {}
        return {"type": "array", "items": self.of.schema(), **least, "maxItems": self.most}


@dataclass(frozen=True, slots=True)
class Entry:
    """An object with its own fields."""

    cls: type

    def read(self, value: Any, where: str) -> Any:
        return read_as(self.cls, value, where)

    def schema(self) -> JsonSchema:
        return schema_of(self.cls)


@dataclass(frozen=True, slots=True)
class Tree:
    """Any JSON value, bounded in size and depth: what only a template looks into."""

    most: int  # values and characters in all
    shape: str = ""  # its type, where it is one and known

    def read(self, value: Any, where: str) -> Any:
        if self.shape == "object" and not isinstance(value, dict):
            raise bad_request(where, f"{where} must be an object")
        self._measure(value, where, 0, [self.most])
        return value

    def schema(self) -> JsonSchema:
        return {"type": self.shape} if self.shape else {}

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

    def schema(self) -> JsonSchema:
        return {"enum": [None, *self.neutral], "deprecated": True, "description": f"Not supported; {self.instead}."}
