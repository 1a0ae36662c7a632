"""The name of a full block: what it holds, and everything before it.

    digest(block) = SHA-256( domain | parent digest | block size | model digest | salt | token ids )

each part length-prefixed or of fixed length, integers little-endian, so that the name is equal in every process and
on every machine, and two different inputs never encode alike. The salt is empty but at the one block where a tenant's
chain leaves the public prefixes; from there on the parent's digest carries it.
"""

import hashlib
from collections.abc import Sequence
from struct import pack

DIGEST_BYTES = 32
ROOT = b"\0" * DIGEST_BYTES  # the parent of a first block
_DOMAIN = b"kilburn.block.1\0"


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return pack(f"<{len(tokens)}i", *tokens)


class BlockHasher:
    """Digests for one model at one block size."""

    def __init__(self, model_digest: bytes, block_size: int) -> None:
        self._prefix = _DOMAIN + pack("<II", block_size, len(model_digest)) + model_digest
        self._num_bytes = 4 * block_size
        self._head = self._prefix + pack("<II", 0, self._num_bytes)  # of nearly all

    def digest(self, parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
        """The 32-byte name of the full block that holds `tokens` and follows the block named `parent`."""
        packed = pack_tokens(tokens)
        if salt or len(packed) != self._num_bytes:
            head = self._prefix + pack("<II", len(salt), len(packed))
        else:
            head = self._head
        return hashlib.sha256(head + parent + salt + packed).digest()
