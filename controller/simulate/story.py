"""What happened in a world, kept raw and told only when somebody asks.

Each entry remembers which requests it is about (none: it is about everybody), so that a failure can tell the story of
the sequences involved and leave the rest out.
"""

from dataclasses import dataclass

from kilburn.controller.core.events import Arrived, Effect, Event, Names, Send, Submit, Tick
from kilburn.shared.messages import Beat, Hello, StepPlan, StepResult, Welcome


@dataclass(frozen=True, slots=True)
class Entry:
    at_s: float
    mark: str  # ">" told to the core, "<" asked by it, "*" done by the world
    what: Event | Effect | str
    requests: frozenset[int]
    where: str = ""  # of a world that is a part of another


class Story:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(
        self, at_s: float, mark: str, what: "Event | Effect | str", requests: "frozenset[int]" = frozenset()
    ) -> None:
        self.entries.append(Entry(at_s, mark, what, requests))

    def tell(self, requests: "frozenset[int] | None" = None, most: int = 400) -> str:
        """The last `most` lines about these requests, or about all."""
        chosen = [
            entry
            for entry in self.entries
            if requests is None or entry.requests & requests or (not entry.requests and not _is_routine(entry.what))
        ]
        left_out = len(chosen) - most
        lines = [f"  ... {left_out} earlier lines left out"] if left_out > 0 else []
        lines += [
            f"  {entry.at_s:9.4f} {entry.mark} {entry.where and entry.where + ' '}{_text(entry.what)}"
            for entry in chosen[-most:]
        ]
        return "\n".join(lines)


def _is_routine(what: "Event | Effect | str") -> bool:
    match what:
        case Tick() | Names() | Arrived(message=Beat()) | Send(message=Beat()):
            return True
        case _:
            return False


def _text(what: "Event | Effect | str") -> str:
    match what:
        case str():
            return what
        case Names(group, published, withdrawn):
            return f"{group}: {len(published)} names published, {len(withdrawn)} withdrawn"
        case Arrived(peer, StepResult() as result):
            draws = f"{result.num_tokens} {result.tokens}"
            unwell = f" failed {result.failed} lost {result.lost}" if result.failed or result.lost else ""
            return f"{peer.decode()}: result {result.lease}.{result.step} {draws}{unwell}"
        case Arrived(peer, Hello() as hello):
            limits = f"{hello.num_blocks} blocks, {hello.max_rows} rows, {hello.max_step_tokens} positions a step"
            return f"{peer.decode()}: hello, {limits}"
        case Arrived(peer, message):
            return f"{peer.decode()}: {message}"
        case Submit(request_id, prompt, max_tokens, sampling, n, priority, salt, beams):
            stops = sampling.stop_ids or "none"
            more = f" salt={salt!r}" * bool(salt) + (f" {beams}" if beams is not None else "")
            of = f"{list(prompt)} +{max_tokens} n={n} priority={priority} stop ids {stops}"
            return f"submit {request_id}: {of}{more}"
        case Send(peer, StepPlan() as plan):
            return f"{peer.decode()}: {_plan_text(plan)}"
        case Send(peer, Welcome(lease=lease)):
            return f"{peer.decode()}: welcome, lease {lease}"
        case Send(peer, message):
            return f"{peer.decode()}: {message}"
        case _:
            return repr(what)


def _plan_text(plan: StepPlan) -> str:
    parts = [f"plan {plan.lease}.{plan.step}"]
    for name in ("swaps_out", "copies", "swaps_in"):
        moves = getattr(plan, name)
        if moves:
            parts.append(f"{name} {' '.join(f'{a}>{b}' for a, b in moves)}")
    for a in plan.admits:
        parts.append(f"admit row {a.row} at {a.start} {list(a.tokens)} in {list(a.blocks)} {a.sampling.choose}")
    grown: dict[int, list[int]] = {}
    for at, block in zip(plan.grown_at, plan.grown_blocks, strict=False):
        grown.setdefault(at, []).append(block)
    for i, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=False)):
        parts.append(f"row {row} +{count}" + (f" grows {grown[i]}" if i in grown else ""))
    return "; ".join(parts)
