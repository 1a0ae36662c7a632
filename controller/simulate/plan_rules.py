"""What a plan may not say, whatever the worker holds: the rules that can be read off the plan alone.

Moves run before work, and a worker may run all swaps out at once, then all copies, then all swaps in, each batch in
any order. So no result may depend on an order within a batch, and no move may read what a later batch of the same
plan fills: every rule here is one such dependency.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kilburn.shared.messages import StepPlan
from kilburn.shared.types import LawBroken


class ContractBroken(LawBroken):
    """A plan that the protocol does not allow: a bug of the core that made it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker announced in its Hello."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_rows: int
    max_step_tokens: int
    max_len: int


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Raise ContractBroken if the plan breaks a rule that needs no knowledge of what came before."""
    _check_columns(plan, limits)
    _check_blocks(plan, limits)
    _check_moves(plan)


def demand(holds: bool, law: str) -> None:
    if not holds:
        raise ContractBroken(law)


def _check_columns(plan: StepPlan, limits: Limits) -> None:
    demand(len(plan.rows) == len(plan.counts), "as many counts as rows")
    demand(len(plan.grown_at) == len(plan.grown_blocks), "as many grown blocks as places that they grow at")
    demand(all(0 <= at < len(plan.rows) for at in plan.grown_at), "a block grows at an advance of this plan")
    demand(all(count >= 1 for count in plan.counts), "an advance computes at least one position")
    demand(sum(plan.counts) <= limits.max_step_tokens, f"at most {limits.max_step_tokens} positions in a plan")
    demand(len(set(plan.rows)) == len(plan.rows), "a row advances once in a plan")
    admitted = [admit.row for admit in plan.admits]
    demand(len(set(admitted)) == len(admitted), "a row is admitted once in a plan")
    for row in (*plan.rows, *admitted):
        demand(0 <= row < limits.max_rows, f"row {row} of {limits.max_rows}")


def _in_range(blocks: Iterable[int], num_blocks: int, tier: str) -> None:
    for block in blocks:
        demand(0 <= block < num_blocks, f"{tier} block {block} of {num_blocks}")


def _check_blocks(plan: StepPlan, limits: Limits) -> None:
    _in_range(plan.grown_blocks, limits.num_blocks, "device")
    for admit in plan.admits:
        _in_range(admit.blocks, limits.num_blocks, "device")
    _in_range([b for pair in plan.copies for b in pair], limits.num_blocks, "device")
    _in_range([device for device, _ in plan.swaps_out], limits.num_blocks, "device")
    _in_range([host for _, host in plan.swaps_out], limits.num_host_blocks, "host")
    _in_range([host for host, _ in plan.swaps_in], limits.num_host_blocks, "host")
    _in_range([device for _, device in plan.swaps_in], limits.num_blocks, "device")


def _check_moves(plan: StepPlan) -> None:
    copied = [destination for _, destination in plan.copies]
    filled = [device for _, device in plan.swaps_in]
    taken = [host for _, host in plan.swaps_out]
    moved = copied + filled
    demand(len(set(moved)) == len(moved), "no device block is the destination of two moves")
    demand(len(set(taken)) == len(taken), "no host block is the destination of two moves")
    sources = {source for source, _ in plan.copies}
    demand(sources.isdisjoint(copied), "no copy's destination is another copy's source")
    demand(sources.isdisjoint(filled), "no copy reads a block that a swap in of the same plan fills")
    demand({host for host, _ in plan.swaps_in}.isdisjoint(taken), "a host block read by a swap in is not taken")
    left = {device for device, _ in plan.swaps_out}
    demand(left.isdisjoint(copied), "no swap out reads a block that a copy of the same plan fills")
    demand(left.isdisjoint(filled), "no swap out reads a block that a swap in of the same plan fills")
