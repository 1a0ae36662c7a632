"""Finding computed prefixes by name.

    tokens    [ a b c d ][ e f g h ][ i j         bs = 4
    digests      D0   ------> D1                  D1 = H(D0, e f g h)

A name stands for a block's tokens and for everything before it, so equal blocks after different pasts never alias. A
hit compares the stored tokens and the parent too: a collision is a miss. The last token is never hit, since the logits
at its position are what a sequence comes for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kilburn.controller.core.block_pool import BlockPool, Name
from kilburn.shared.digest import ROOT


@dataclass(frozen=True, slots=True)
class Salt:
    """What keeps a tenant's blocks apart: it enters at the block of position `after`, and is in all names from there.

    The positions before are wholly inside a public named prefix, whose blocks everybody shares.
    """

    value: bytes = b""
    after: int = 0


UNSALTED = Salt()


class Hasher(Protocol):
    def digest(self, parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes: ...


def extend_chain(
    chain: list[bytes], hasher: Hasher, block_size: int, tokens: Sequence[int], num_blocks: int, salt: Salt
) -> None:
    """Make `chain` hold the digests of the first `num_blocks` full blocks of `tokens`."""
    for i in range(len(chain), num_blocks):
        parent = chain[i - 1] if i else ROOT
        value = salt.value if i == salt.after // block_size else b""
        chain.append(hasher.digest(parent, tokens[i * block_size : (i + 1) * block_size], value))


class PrefixIndex:
    """What of a prompt is already in the pool. Digests of a sequence are kept by the sequence, as `chain`."""

    def __init__(self, pool: BlockPool, hasher: Hasher, block_size: int) -> None:
        self._pool, self._hasher, self._block_size = pool, hasher, block_size

    def extend(self, chain: list[bytes], tokens: Sequence[int], num_blocks: int, salt: Salt) -> None:
        """Make `chain` hold the digests of the first `num_blocks` full blocks of `tokens`."""
        extend_chain(chain, self._hasher, self._block_size, tokens, num_blocks, salt)

    def find(self, chain: list[bytes], i: int, tokens: Sequence[int]) -> int | None:
        """The block that holds full block number i of `tokens`, whose digest is in `chain`."""
        block = self._pool.find(chain[i])
        name = None if block is None else self._pool.name_of(block)
        if name is None or name.parent != (chain[i - 1] if i else ROOT):
            return None
        size = self._block_size
        return block if name.tokens == tuple(tokens[i * size : (i + 1) * size]) else None

    def match(
        self, chain: list[bytes], tokens: Sequence[int], salt: Salt, first: int = 0, most: int | None = None
    ) -> list[int]:
        """The longest run of blocks from number `first` on that the pool holds, without that of the newest token.

        `most`: the first block that is not looked for.
        """
        found: list[int] = []
        end = (len(tokens) - 1) // self._block_size
        for i in range(first, end if most is None else min(end, most)):
            self.extend(chain, tokens, i + 1, salt)
            block = self.find(chain, i, tokens)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, salt: Salt) -> None:
        """Name the full blocks from number `first` on: all of blocks[first:] are full and committed."""
        size = self._block_size
        extend_chain(chain, self._hasher, size, tokens, len(blocks), salt)
        for i in range(first, len(blocks)):
            parent = chain[i - 1] if i else ROOT
            self._pool.publish(blocks[i], Name(chain[i], parent, tuple(tokens[i * size : (i + 1) * size])))
