"""Quick names stand for real ones: equal where these are, and nowhere else, however they are asked for."""

from random import Random

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.prefix_index import PrefixIndex, Salt
from kilburn.controller.simulate.quick import QuickIndex, QuickPool
from kilburn.shared.digest import BlockHasher


def past(rng: Random) -> list[int]:
    """Runs of few tokens, some of them long: many lists begin alike, and blocks come in another order."""
    tokens: list[int] = []
    while len(tokens) < 400 and (not tokens or rng.random() < 0.8):
        tokens += [rng.choice((7, 8, 9))] * rng.choice((1, 3, 4, 8, 9, 16, 40, 300))
    return tokens


def test_quick_names_are_equal_where_real_ones_are() -> None:
    rng = Random("names")
    for size in (1, 4, 16):
        hasher = BlockHasher(b"m" * 32, size)
        quick, real = QuickIndex(QuickPool(1), hasher, size), PrefixIndex(BlockPool(1), hasher, size)
        names: set[tuple[bytes, bytes]] = set()
        for _ in range(100):
            tokens, salt = past(rng), Salt(rng.choice((b"", b"", b"a", b"b")), rng.choice((0, 0, 4 * size)))
            num_blocks, quickly, really = len(tokens) // size, list[bytes](), list[bytes]()
            for end in sorted({*rng.sample(range(num_blocks + 1), min(2, num_blocks + 1)), num_blocks}):
                quick.extend(quickly, tokens, end, salt)
                real.extend(really, tokens, end, salt)
            names |= set(zip(quickly, really, strict=True))
        assert len(names) == len({one for one, _ in names}) == len({one for _, one in names}) > 500
