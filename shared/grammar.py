"""A grammar that an answer must follow, as controller and workers speak of it.

Its source is what the worker's library reads (llguidance: a Lark grammar, or its JSON); the controller's core never
looks into it, and knows it by its digest, as it does blocks.
"""

from dataclasses import dataclass
from hashlib import sha256

MOST_SOURCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Grammar:
    source: bytes  # UTF-8
    digest: bytes

    @classmethod
    def of(cls, source: str) -> "Grammar":
        encoded = source.encode()
        return cls(encoded, sha256(encoded).digest())
