"""The named prefixes of a world: who may begin with them, what they take, and whether they are held.

The arithmetic of pinned blocks is done here once more, from the prefixes that are registered and nothing of the core.
It takes every registered prefix to be held everywhere, which is the most that can be held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kilburn.controller.core.events import Pin, Pinned, Refusal, Refused, Submit
from kilburn.controller.simulate.beams import Search
from kilburn.controller.simulate.scenario import Scenario, blocks_needed, fits
from kilburn.controller.simulate.witness import Leases, WorldBroken, demand
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Hello
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason


@dataclass(slots=True)
class PinCase:
    """What is known of one prefix. A row that computes it looks like one of a request with one token to draw."""

    pin: Pin
    submit: Submit
    at_s: float = 0.0
    emitted: list[list[int]] = field(default_factory=lambda: [[]])
    ended: list[FinishReason | None] = field(default_factory=lambda: [None])
    search: Search | None = None
    is_cancelled: bool = False
    is_refused: bool = False
    is_excused: bool = False  # some worker group could not hold it
    num_pinned: int = 0

    @property
    def is_live(self) -> bool:
        return not self.is_cancelled and not self.is_refused

    def serves(self, submit: Submit) -> bool:
        return self.pin.is_public or self.pin.salt == submit.salt


class Pins:
    def __init__(self, scenario: Scenario, leases: Leases) -> None:
        self.scenario, self.leases = scenario, leases
        self.cases: dict[int, PinCase] = {}
        self._gone_now: set[int] = set()  # unpinned in this turn, perhaps after something was said of them

    # --- arithmetic

    def live(self) -> list[PinCase]:
        return [case for case in self.cases.values() if case.is_live]

    def shared_blocks(self, submit: Submit, block_size: int) -> int:
        """Pinned blocks that a request begins with; of one whose prompt is scored, all must be computed."""
        if submit.sampling.prompt_logprobs >= 0:
            return 0
        runs = [run_of(submit.prompt, case.pin.tokens) for case in self.live() if case.serves(submit)]
        return min(max(runs, default=0), len(submit.prompt) - 1) // block_size

    def fits(self, submit: Submit, hello: Hello) -> bool:
        """Whether the request fits beside all prefixes."""
        size = hello.layout.block_size
        spare = hello.num_blocks - sum(blocks_for(len(case.pin.tokens), size) for case in self.live())
        return fits(submit, hello, self.scenario, spare + self.shared_blocks(submit, size))

    def known_run(self, submit: Submit) -> int:
        """Tokens of a prompt that lie in some prefix that its tenant could ever begin with."""
        return max((run_of(submit.prompt, c.pin.tokens) for c in self.cases.values() if c.serves(submit)), default=0)

    def may_be_cached(self, submit: Submit, num_cached: int, block_size: int) -> bool:
        """Whole blocks; or up to where the prompt leaves a prefix, whose last block is copied."""
        if num_cached % block_size == 0:
            return True
        runs = [run_of(submit.prompt, case.pin.tokens) for case in self.live() if case.serves(submit)]
        return num_cached in {min(run, len(submit.prompt) - 1) for run in runs}

    # --- what happens to them

    def registered(self, pin: Pin, now: float) -> None:
        self._gone_now = set()
        submit = Submit(pin.prefix_id, pin.tokens, 1, Sampling(temperature=0.0))
        self.cases[pin.prefix_id] = PinCase(pin, submit, now)

    def unpinned(self, prefix_id: int) -> None:
        if prefix_id in self.cases:
            self.cases[prefix_id].is_cancelled = True
            self._gone_now.add(prefix_id)

    def turned(self) -> None:
        """A turn is over."""
        self._gone_now = set()

    def refused(self, refused: Refused, requests: list[Submit], is_shut: bool) -> None:
        case, pin_id = self.cases[refused.request_id], refused.request_id
        demand(not case.num_pinned and not case.is_refused, "a prefix is refused after it was taken", pin_id)
        match refused.refusal:
            case Refusal.EMPTY:
                holds = not case.pin.tokens
            case Refusal.SHUTTING_DOWN:
                holds = is_shut
            case Refusal.TOO_LONG:
                holds = any(len(case.pin.tokens) + 1 > view.hello.max_len for view in self.leases.views.values())
            case Refusal.PINS_FULL:
                holds = any(self._is_too_much(case, view.hello, requests) for view in self.leases.views.values())
            case _:
                holds = False
        demand(holds and bool(refused.message), f"a prefix is refused ({refused.refusal.value}) for nothing", pin_id)
        case.is_refused = True

    def _is_too_much(self, case: PinCase, hello: Hello, requests: list[Submit]) -> bool:
        """Whether the prefix is too long, more than may be pinned, or would strand a request."""
        size = hello.layout.block_size
        gone = [self.cases[number] for number in self._gone_now]  # after this one came
        others = [other for other in (*self.live(), *gone) if other is not case and not other.is_refused]
        pinned = sum(blocks_for(len(one.pin.tokens), size) for one in (*others, case))
        if len(case.pin.tokens) + 1 > hello.max_len or pinned > self.scenario.most_pinned * hello.num_blocks:
            return True
        for submit in requests:
            need = blocks_needed(len(submit.prompt), submit.max_tokens, submit.width, size)
            case.is_refused = True  # for a moment: what was shared before it came
            shared = self.shared_blocks(submit, size)
            case.is_refused = False
            if need - shared > hello.num_blocks - pinned:
                return True
        return False

    def pinned(self, pinned: Pinned) -> None:
        case, pin_id = self.cases.get(pinned.prefix_id), pinned.prefix_id
        if case is None:
            raise WorldBroken(f"prefix {pin_id} is pinned, which nobody asked for")
        demand(case.is_live or pin_id in self._gone_now, "a prefix is pinned after it was refused or deleted", pin_id)
        views = [view for view in self.leases.views.values() if view.hello.name == pinned.group]
        if not views:
            return  # its lease was over by the end of the turn
        [view] = views
        size = view.hello.layout.block_size
        demand(pinned.num_blocks == blocks_for(len(case.pin.tokens), size), "another number of blocks", pin_id)
        demand(pin_id not in view.pins or view.num_lost > 0, "pinned twice, though nothing was lost", pin_id)
        case.num_pinned += 1
        view.pins[pin_id] = pinned.num_blocks
        held = sum(n for other, n in view.pins.items() if self.cases[other].is_live)
        most = self.scenario.most_pinned * view.hello.num_blocks
        demand(held <= most, f"{held} blocks are pinned of {view.hello.num_blocks}", pin_id)

    def not_pinned(self, prefix_id: int, group: str) -> None:
        case = self.cases.get(prefix_id)
        demand(group in {hello.name for hello in self.leases.hellos.values()}, f"{group} is no worker group", prefix_id)
        if case is None:
            raise WorldBroken(f"prefix {prefix_id} could not be pinned, which nobody asked for")
        case.is_excused = True

    def missing(self) -> str:
        """A prefix that no worker group holds, or not one that has used it, in words; empty if there is none."""
        views = [view for view in self.leases.views.values() if view.leaves_s is None]
        for case in self.live():
            number, tokens = case.pin.prefix_id, case.pin.tokens
            if case.is_excused or not views:
                continue
            if not any(number in view.pins for view in views):
                return f"prefix {number} is held by nobody"
            for view in views:
                users = [told for told in view.users.values() if case.serves(told.submit) and told.at_s > case.at_s]
                is_used = any(told.submit.prompt[: len(tokens)] == tokens for told in users)
                if is_used and number not in view.pins and not self._is_too_much(case, view.hello, []):
                    return f"prefix {number} is not held by {view.hello.name}, where it was used"
        return ""


def run_of(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two lists share."""
    run = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        run += 1
    return run
