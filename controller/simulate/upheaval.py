"""What befalls worker groups as a whole in a world: they join late, are told to leave, are cut off; requests kill them.

Drawn from the seed beside everything else, so that worlds without any of it are what they were. In a world with a
poisonous request nothing else ends a worker, so that it can be said of each death who did it.
"""

from dataclasses import dataclass
from random import Random

LATEST_S = 3.0


@dataclass(frozen=True, slots=True)
class Upheaval:
    late_joins_s: tuple[float, ...] = ()  # of groups that nobody expected
    retires: tuple[tuple[float, int], ...] = ()  # (when, number of the group)
    returns: bool = True  # those that left come back after a while
    cuts: tuple[tuple[float, float, int], ...] = ()  # (from, to, number of the group): nothing gets through, either way
    poison: tuple[tuple[int, int], ...] = ()  # (request, after so many of its tokens): whoever computes it there dies

    @property
    def over_s(self) -> float:
        """When all of it has happened."""
        return max(
            (*self.late_joins_s, *(at for at, _ in self.retires), *(end for _, end, _ in self.cuts)), default=0.0
        )


def draw_upheaval(seed: int, num_groups: int, num_requests: int) -> Upheaval:
    rng = Random(seed ^ 0x9B0)
    late = tuple([rng.uniform(0.1, LATEST_S) for _ in range(rng.choice((1, 1, 2)))]) if rng.random() < 0.15 else ()
    num_groups += len(late)
    retires = []
    if rng.random() < 0.25:
        retires = [(rng.uniform(0.0, LATEST_S / 2), rng.randrange(num_groups)) for _ in range(rng.choice((1, 2, 3)))]
    returns = rng.random() < 0.8
    if rng.random() < 0.12:
        guilty = rng.sample(range(1, num_requests + 1), min(rng.choice((1, 1, 2)), num_requests))
        poison = tuple([(request, rng.choice((0, 0, 1, 3))) for request in guilty])
        return Upheaval(late, tuple(retires), returns, poison=poison)
    cuts = []
    if rng.random() < 0.15:
        for _ in range(rng.choice((1, 2))):
            from_s = rng.uniform(0.0, LATEST_S / 2)
            cuts.append((from_s, from_s + rng.choice((0.2, 1.5, 6.0)), rng.randrange(num_groups)))
    return Upheaval(late, tuple(retires), returns, tuple(cuts))
