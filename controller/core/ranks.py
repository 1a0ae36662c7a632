"""Worker groups of several ranks: who is still waited for, and which steps all of them agree upon.

    Hello of each rank --> Muster --> one Hello for the group: pools of the smallest --> a lease

    rank 0    StepResult(1)      StepResult(2)            answers in the order of steps, and so do the others;
    rank 1                       StepDone(1)              who is ahead of whom is not known:
    rank 2         StepDone(1)                StepDone(2)
    Agreement                    step 1                   a step is committed when all ranks are in and agree

Each rank confirms a digest of what it was told and what came of it. A rank that leaves out a step, or confirms another
one than rank 0 answered, disagrees; nobody asks who is right. A worker group of one rank agrees with itself.
"""

from collections.abc import Iterable
from dataclasses import replace

from kilburn.shared.agreement import step_digest
from kilburn.shared.messages import Hello, StepDone, StepPlan, StepResult


class RanksDisagree(Exception):
    """What the ranks of a worker group say does not fit together. Ends the lease."""


class Muster:
    """Ranks that said Hello and wait for the others of their group."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, tuple[bytes, Hello]]] = {}  # by group, by rank

    @property
    def present(self) -> dict[str, tuple[int, int]]:
        """By group: ranks that are there, and how many there are to be."""
        return {name: (len(ranks), _any_of(ranks).world) for name, ranks in self._waiting.items()}

    def objection(self, hello: Hello) -> str | None:
        """Why this rank cannot join the others of its name."""
        if hello.rank >= hello.world:
            return f"rank {hello.rank} of {hello.world}: ranks are counted from 0"
        for rank, (_, other) in self._waiting.get(hello.name, {}).items():
            differences = [name for name in _ALIKE if getattr(hello, name) != getattr(other, name)]
            if differences and rank != hello.rank:
                what = " and ".join(differences)
                return f"rank {hello.rank} of {hello.name} and its rank {rank} differ in {what}: start both alike"
        return None

    def add(self, peer: bytes, hello: Hello) -> None:
        """A rank without objection. Whoever was this rank before is forgotten."""
        self._waiting.setdefault(hello.name, {})[hello.rank] = (peer, hello)

    def forget(self, peer: bytes) -> None:
        """A rank that left."""
        for name, ranks in list(self._waiting.items()):
            for rank in [rank for rank, (other, _) in ranks.items() if other == peer]:
                del ranks[rank]
            if not ranks:
                del self._waiting[name]

    def is_complete(self, name: str) -> bool:
        ranks = self._waiting.get(name)
        return ranks is not None and len(ranks) == _any_of(ranks).world

    def take(self, name: str) -> tuple[list[bytes], list[str], Hello]:
        """The peers of a complete group in order of their ranks, which lives these are, and what they do together."""
        ranks = self._waiting.pop(name)
        peers, hellos = zip(*[ranks[rank] for rank in sorted(ranks)], strict=True)
        least = {name: min(getattr(hello, name) for hello in hellos) for name in ("num_blocks", "num_host_blocks")}
        together = replace(hellos[0], num_blocks=least["num_blocks"], num_host_blocks=least["num_host_blocks"])
        return list(peers), [hello.boot for hello in hellos], together


# What all ranks of a group say alike.
_ALIKE = ("world", "model_digest", "layout", "max_rows", "max_step_tokens", "max_len", "vocab_size")


def _any_of(ranks: dict[int, tuple[bytes, Hello]]) -> Hello:
    return next(iter(ranks.values()))[1]


class Agreement:
    """What the ranks of one lease say of its steps."""

    __slots__ = ("_digests", "_newest", "_plans", "_results", "num_planned", "num_settled")

    def __init__(self, world: int) -> None:
        self._newest = [0] * world  # that each rank answered
        self._plans: dict[int, StepPlan] = {}  # not settled
        self._results: dict[int, StepResult] = {}
        self._digests: dict[int, dict[int, bytes]] = {}  # of ranks > 0
        self.num_planned = self.num_settled = 0  # steps

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent to all ranks."""
        self._plans[plan.step] = plan
        self.num_planned = plan.step

    def went_on(self, num_steps: int, under_way: Iterable[StepPlan]) -> None:
        """So many steps were settled and as many planned, for simulations that take them at once."""
        self.num_settled += num_steps
        self.num_planned += num_steps
        self._newest = [step + num_steps for step in self._newest]
        self._plans = {plan.step: plan for plan in under_way}

    def hear(self, rank: int, message: StepResult | StepDone) -> None:
        """What a rank says of a step. Raises RanksDisagree."""
        if isinstance(message, StepResult) is not (rank == 0):
            raise RanksDisagree(f"rank {rank} sent a {type(message).__name__}: rank 0 answers, the others confirm")
        if message.step <= self._newest[rank]:
            return  # said already
        expected = self._newest[rank] + 1
        if message.step != expected or message.step > self.num_planned:
            due = expected if expected <= self.num_planned else None
            raise RanksDisagree(f"step {message.step} answered, expected {due}")
        self._newest[rank] = message.step
        match message:
            case StepResult():
                self._results[message.step] = message
            case StepDone(digest=digest):
                self._digests.setdefault(message.step, {})[rank] = digest

    def settle(self) -> StepResult | None:
        """The next step's result, if all ranks are in; each step once, in order. Raises RanksDisagree."""
        step = self.num_settled + 1
        if min(self._newest) < step:
            return None
        self.num_settled = step
        plan, result, digests = self._plans.pop(step), self._results.pop(step), self._digests.pop(step, {})
        if digests:
            expected = step_digest(plan, result)
            for rank, digest in sorted(digests.items()):
                if digest != expected:
                    raise RanksDisagree(f"rank {rank} disagrees about step {step}")
        return result
