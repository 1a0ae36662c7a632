"""Kinds of setting: how text becomes a value, what is legal, and how a value is written back as text.

Flags, environment and file all speak text to the same kind. `parse` raises ValueError whose words tell the user what to
write instead; `parse(show(value)) == value` for every legal value.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a complaint about `word`: the word that was most likely meant, if there is one."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class Kind(Protocol):
    @property
    def shape(self) -> str:
        """What stands for a value in a usage line."""
        ...

    def parse(self, text: str) -> Any: ...

    def show(self, value: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Text:
    shape: str = "TEXT"

    def parse(self, text: str) -> str:
        if "\0" in text:
            raise ValueError("give a text without NUL bytes")
        return text

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    choices: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()  # other words, and the choice that each stands for

    @property
    def shape(self) -> str:
        return "|".join(self.choices)

    def parse(self, text: str) -> str:
        text = dict(self.also).get(text, text)
        if text not in self.choices:
            raise ValueError(f"give one of {', '.join(self.choices)}{nearest(text, self.choices)}")
        return text

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number in [low, high]."""

    low: int
    high: int
    shape: str = "N"

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9][0-9_]{0,18}", text.strip()) or not self.low <= int(text) <= self.high:
            raise ValueError(f"give a whole number from {self.low} to {self.high}")
        return int(text)

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Counts:
    """Some whole numbers in [low, high]: 512,2048,8192."""

    low: int
    high: int
    shape: str = "N,N,..."

    def parse(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(Count(self.low, self.high).parse(part) for part in text.split(","))
        except ValueError as error:
            raise ValueError(f"give whole numbers from {self.low} to {self.high}, with commas between them") from error

    def show(self, value: tuple[int, ...]) -> str:
        return ",".join(map(str, value))


@dataclass(frozen=True, slots=True)
class Number:
    """A number in [low, high], not necessarily whole."""

    low: float
    high: float
    shape: str = "X"

    def parse(self, text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", text.strip()) or not self.low <= float(text) <= self.high:
            raise ValueError(f"give a number from {self.low:g} to {self.high:g}")
        return float(text)

    def show(self, value: float) -> str:
        return f"{value:.12g}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some numbers in [low, high]: 0.5,1,2."""

    low: float
    high: float
    shape: str = "X,X,..."

    def parse(self, text: str) -> tuple[float, ...]:
        try:
            return tuple(Number(self.low, self.high).parse(part) for part in text.split(","))
        except ValueError as error:
            raise ValueError(f"give numbers from {self.low:g} to {self.high:g}, with commas between them") from error

    def show(self, value: tuple[float, ...]) -> str:
        return ",".join(Number(self.low, self.high).show(one) for one in value)


@dataclass(frozen=True, slots=True)
class Choices:
    """Some of several words: paged,batch."""

    choices: tuple[str, ...]

    @property
    def shape(self) -> str:
        return "|".join(self.choices) + ",..."

    def parse(self, text: str) -> tuple[str, ...]:
        try:
            return tuple(Choice(self.choices).parse(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise ValueError(f"{error}; with commas between several") from error

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


@dataclass(frozen=True, slots=True)
class Switch:
    shape: str = ""

    def parse(self, text: str) -> bool:
        match text.strip().lower():
            case "true" | "yes" | "on" | "1":
                return True
            case "false" | "no" | "off" | "0":
                return False
        raise ValueError("give true or false")

    def show(self, value: bool) -> str:
        return "true" if value else "false"


_SIZE_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _with_unit(text: str, units: Mapping[str, float], want: str) -> float:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text.strip())
    by_folded = {unit.lower(): factor for unit, factor in units.items()}
    if match is None or match[2].lower() not in by_folded:
        raise ValueError(want)
    return float(match[1]) * by_folded[match[2].lower()]


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, written with a unit: 512MiB, 1.5GiB, 2GB. A bare number is bytes."""

    low: int = 0
    shape: str = "SIZE"

    def parse(self, text: str) -> int:
        want = "give a size such as 512MiB or 1.5GiB" + (f", at least {self.show(self.low)}" if self.low else "")
        num_bytes = int(_with_unit(text, _SIZE_UNITS, want))
        if not self.low <= num_bytes < 1 << 60:
            raise ValueError(want)
        return num_bytes

    def show(self, value: int) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if value and value % _SIZE_UNITS[unit] == 0:
                return f"{value // _SIZE_UNITS[unit]}{unit}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Share:
    """So much of something whose size is known only where the setting is used."""

    fraction: float


@dataclass(frozen=True, slots=True)
class SizeOrShare:
    """Bytes as of `Size`, or a share of the memory: 25% or 0.25. A bare whole number is bytes."""

    shape: str = "SIZE|SHARE"

    def parse(self, text: str) -> int | Share:
        want = "give a size such as 512MiB or 1.5GiB, or a share of the memory such as 25% or 0.25"
        share = re.fullmatch(r"(?:0?(\.[0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%)", text.strip())
        if share is None:
            if re.fullmatch(r"[0-9]+\.[0-9]+", text.strip()):
                raise ValueError(want)  # neither whole bytes nor less than all
            try:
                return Size().parse(text)
            except ValueError:
                raise ValueError(want) from None
        fraction = float(share[1]) if share[1] else float(share[2]) / 100
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(want)
        return Share(fraction) if fraction else 0

    def show(self, value: int | Share) -> str:
        return f"{100 * value.fraction:.12g}%" if isinstance(value, Share) else Size().show(value)


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, written with a unit: 250ms, 30s, 2m, 1h. A bare number is seconds."""

    low_s: float = 0.0
    high_s: float = 7 * 86400.0
    shape: str = "TIME"

    def parse(self, text: str) -> float:
        want = f"give a time such as 500ms, 30s or 2m, from {self.low_s:g}s to {self.high_s:g}s"
        seconds = _with_unit(text, _SECONDS, want)
        if not self.low_s <= seconds <= self.high_s:
            raise ValueError(want)
        return seconds

    def show(self, value: float) -> str:
        return f"{value:.12g}s"
