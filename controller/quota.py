"""What a key may use, where its line in the file of keys says so.

    at-once=4     requests under way                  more are refused until one of them ends
    rpm=60        requests, in a minute               a bucket that holds so many and fills up within a minute
    tpm=90000     tokens of prompts and answers       likewise: prompts are taken out when they are known, answers at
                                                      the end

How long an answer gets is known at its end only, so a bucket of tokens may go below zero; nobody with that key begins
until it is above zero again. Time is an argument. What this file does not know: HTTP, tenants.
"""

from dataclasses import dataclass, field

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """0: any number."""

    at_once: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    @property
    def is_any(self) -> bool:
        return not (self.at_once or self.requests_per_minute or self.tokens_per_minute)


ANY = Allowance()


@dataclass(frozen=True, slots=True)
class Exceeded:
    what: str  # the word of the file of keys, with its number
    retry_after_s: float


@dataclass(slots=True)
class Bucket:
    """Holds at most `most`, and so many flow in per minute. Law: level <= most."""

    most: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(float(self.most), self.level + (now - self.at) * self.most / MINUTE_S)
        self.at = now

    @property
    def lacks_s(self) -> float:
        """How long until it holds one."""
        return max(1.0 - self.level, 0.0) * MINUTE_S / self.most


class Meter:
    """Of one key."""

    def __init__(self, allowance: Allowance, now: float) -> None:
        self._allowance = allowance
        self._requests = Bucket(allowance.requests_per_minute, allowance.requests_per_minute, now)
        self._tokens = Bucket(allowance.tokens_per_minute, allowance.tokens_per_minute, now)
        self.num_under_way = 0

    def exceeded(self, now: float) -> Exceeded | None:
        """Whether a request that comes now is one too many."""
        allowed = self._allowance
        if allowed.at_once and self.num_under_way >= allowed.at_once:
            return Exceeded(f"at-once={allowed.at_once}", 1.0)
        for word, bucket in (("rpm", self._requests), ("tpm", self._tokens)):
            if not bucket.most:
                continue
            bucket.fill(now)
            if bucket.level < 1.0:
                return Exceeded(f"{word}={bucket.most}", bucket.lacks_s)
        return None

    def begin(self) -> None:
        self.num_under_way += 1
        self._requests.level -= 1.0

    def charge(self, num_tokens: int) -> None:
        self._tokens.level -= num_tokens

    def end(self) -> None:
        self.num_under_way -= 1


@dataclass(slots=True)
class Meters:
    """Of all keys that have an allowance. As many as the file of keys has lines."""

    _meters: dict[bytes, Meter] = field(default_factory=dict)

    def of(self, key_id: bytes, allowance: Allowance, now: float) -> Meter:
        meter = self._meters.get(key_id)
        if meter is None:
            meter = self._meters[key_id] = Meter(allowance, now)
        return meter
