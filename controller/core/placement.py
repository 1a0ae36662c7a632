"""Which worker group a request goes to: where it is predicted to be served soonest.

    cost = (own + ahead) x token_s        prompt tokens to compute before its first token: its own, less those that a
                                          cached prefix (or a named one) spares it there, and those of who is before it
         + (1 + rounds) x answer x step_s its tokens, one for each step; once more for each time that all rows there
                                          have to become free before it gets its own
         + short x block_size x token_s   pressure: blocks that it and those ahead will want and the pool has not got;
                                          somebody will be preempted for each, and compute what was in it again

All in seconds, by what each group has shown: token_s is what a prompt's token adds to its steps, step_s a step of its
decodes with this request's rows among them (pacing.py). So a slow device, a small pool, a long line and a cold cache
are amounts of the same thing, and groups need not be alike. What a group has not shown yet is taken to be as fast as
the fastest that has, so that a newcomer is tried at once. `answer` is the tokens asked for, at most ANSWER: how many
will come nobody knows.

Where the best are within DOUBT of each other such predictions do not tell who is better, and the power of two choices
does: of two of them, taken in turn by the request's arrival, the one with fewer sequences. A group that is leaving, or
in doubt, is given nobody.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing

from kilburn.controller.core.home import Home
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group
from kilburn.shared.layout import blocks_for

ANSWER = 256  # tokens
DOUBT = 0.1
TOKEN_S, STEP_S = 1e-4, 0.02  # before any group has shown anything


def choose(homes: Iterable[Home], group: Group) -> Home | None:
    """The home for a group, or None where no lease that takes requests has room for it."""
    fitting = [home for home in homes if home.lease.takes_requests and home.fits(group)]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    costs = costs_s(fitting, group)
    least_s = min(costs)
    good = [home for home, cost_s in zip(fitting, costs, strict=True) if cost_s <= least_s * (1.0 + DOUBT)]
    return _of_two(good, group.place.arrival)


def can_move(home: Home, homes: Iterable[Home]) -> bool:
    """Whether others would take each request that is here."""
    others = [other for other in homes if other.lease.takes_requests and other is not home]
    return all(any(other.fits(group) for other in others) for group in home.scheduler.line.requests)


def _of_two(homes: Listing[Home], arrival: int) -> Home:
    """Of two of these the one with less to do. All pairs get their turn as requests arrive."""
    first = arrival % len(homes)
    apart = 1 + arrival // len(homes) % max(len(homes) - 1, 1)
    pair = (homes[first], homes[(first + apart) % len(homes)])
    return min(pair, key=lambda home: (home.scheduler.line.load, home.lease.id))


def costs_s(homes: Collection[Home], group: Group) -> list[float]:
    """What the request would take on each of these, in seconds."""
    schedulers = [home.scheduler for home in homes]
    token_s = [scheduler.pacing.token_s for scheduler in schedulers]
    step_s = [scheduler.pacing.decodes_s(scheduler.line.load + group.width) for scheduler in schedulers]
    best_token_s = min([shown for shown in token_s if shown], default=TOKEN_S)
    best_step_s = min([shown for shown in step_s if shown], default=STEP_S)
    chains: dict[int, list[bytes]] = {}  # digests of the prompt's blocks, by block size
    return [
        _cost_s(
            scheduler,
            group,
            chains.setdefault(scheduler.block_size, []),
            token_s[i] or best_token_s,
            step_s[i] or best_step_s,
        )
        for i, scheduler in enumerate(schedulers)
    ]


def _cost_s(scheduler: Scheduler, group: Group, chain: list[bytes], token_s: float, step_s: float) -> float:
    line, first, size = scheduler.line, group.live[0], scheduler.block_size
    num_found = scheduler.found_tokens(group, chain)
    own = len(first.tokens) - num_found
    answer = min(max(first.limit + 1 - len(first.tokens), 0), ANSWER)
    over, ahead = line.load + group.width - line.max_rows, line.num_ahead
    rounds = max(over, 0) / line.max_rows
    wanted = blocks_for(own + answer * group.width, size) + blocks_for(ahead, size)
    short = max(wanted - scheduler.pool.num_available, 0)
    return (own + ahead + short * size) * token_s + (1.0 + rounds) * answer * step_s
