"""What an onlooker may know of the engine at one moment. Numbers only; taking one changes nothing."""

from dataclasses import dataclass, fields

from kilburn.controller.core.departure import Way, Why
from kilburn.controller.core.histogram import Spread
from kilburn.controller.core.home import Home
from kilburn.controller.core.lease import LeaseState
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.step import Counters
from kilburn.controller.core.waste import tail_slots
from kilburn.shared.messages import WorkerMemory


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One worker group: its lease, its pool, its work. Blocks: the four states sum to num_blocks."""

    name: str
    lease: int
    state: LeaseState
    ranks: int  # amounts of memory are each rank's own
    pid: int  # of rank 0
    heard_at: float  # on the clock of whoever turns the engine
    beats_heard: int
    beats_sent: int
    block_size: int
    bytes_per_block: int
    memory: WorkerMemory  # of the worker, beside its pools
    max_len: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    quarantined_blocks: int
    shared_blocks: int  # those that several tables hold
    shared_refs: int  # table entries beyond the first of each block: blocks that sharing saves
    filled_slots: int  # positions of running sequences that have their KV, counted per table
    owned_slots: int  # slots of their tables
    tail_slots: int  # of all owned blocks, each once: slots that no planned position will fill
    running_requests: int
    waiting_requests: int
    running_sequences: int
    flights: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_host_hit_tokens: int  # of these, brought back from the host
    num_host_blocks: int
    free_host_blocks: int
    cached_host_blocks: int
    owned_host_blocks: int  # copies that swapped groups hold
    quarantined_host_blocks: int
    shared_host_blocks: int
    pinned_blocks: int  # that named prefixes hold, or will
    pinned_owned_blocks: int  # that they hold now, each once
    swapped_requests: int
    preempted: dict[tuple[Way, Why], int]  # groups, by the way they left and by what decided that
    preempted_by_recompute: int
    preempted_by_swap: int
    swapped_in: int
    blocks_out: int
    blocks_in: int
    chosen_by_cost: int
    compared_swap_s: float
    compared_recompute_s: float
    swaps_without_room: int
    returned_by_swap: int
    predicted_swap_s: float
    actual_swap_s: float
    returned_by_recompute: int
    predicted_recompute_s: float
    actual_recompute_s: float
    move_s_per_block: float  # what this worker has shown so far
    compute_s_per_token: float
    blocks_saved: int  # evicted from the device, kept on the host
    host_hits: int  # blocks that came back by their name
    block_copies: int
    evictions: int
    host_evictions: int
    block_lifetimes_s: Spread  # of evicted blocks
    block_idle_s: Spread
    host_block_lifetimes_s: Spread
    host_block_idle_s: Spread
    step_rows: Spread
    step_positions: Spread
    step_budget_use: Spread
    step_flight_s: Spread
    swap_out_s: float
    swap_in_s: float
    copy_s: float
    worker_idle_s: float
    worker_apply_s: float
    worker_forward_s: float
    worker_sample_s: float
    # Waiting requests once more, each counted in one of these:
    waiting_for_blocks: int = 0
    waiting_for_rows: int = 0
    waiting_for_budget: int = 0  # of the next step
    waiting_for_preempted: int = 0  # behind one that was preempted and goes first
    waiting_for_prefix: int = 0  # which somebody is computing
    waiting_for_grammar: int = 0  # which the worker is compiling
    grammars: int = 0  # that the worker holds, or was asked for
    grammars_prepared: int = 0  # since the lease began
    grammars_failed: int = 0
    waiting_tokens: int = 0  # of the prompts of those who wait
    preempted_waiting: int = 0  # of those who wait, preempted before
    step_target_s: float = 0.0  # 0: steps are bounded by tokens alone
    decode_step_s: float = 0.0  # learned: a step without prompts
    prefill_s_per_token: float = 0.0  # learned: what a prompt's token adds to a step
    is_leaving: bool = False  # it was told to, and gets no more requests
    unanswered_since: float | None = None  # since when its work has made no progress; None: it has none

    @property
    def tail_waste(self) -> float:
        """Of the slots of owned blocks, the share that nothing will fill."""
        slots = self.owned_blocks * self.block_size
        return self.tail_slots / slots if slots else 0.0

    # Both tiers' traffic in bytes: whatever moved, and of it evicted blocks that were kept, and hits on them.

    @property
    def bytes_out(self) -> int:
        return self.blocks_out * self.bytes_per_block

    @property
    def bytes_in(self) -> int:
        return self.blocks_in * self.bytes_per_block

    @property
    def bytes_saved(self) -> int:
        return self.blocks_saved * self.bytes_per_block

    @property
    def bytes_hit(self) -> int:
        return self.host_hits * self.bytes_per_block


@dataclass(frozen=True, slots=True)
class Snapshot:
    groups: tuple[GroupSnapshot, ...]
    requests: int  # known to the engine: running, waiting, or between worker groups
    homeless_requests: int  # waiting for a worker group
    waiting_requests: int  # those, and all that were placed and hold no row
    leases_began: int
    leases_ended: int
    requests_displaced: int  # had to leave a worker group whose lease ended
    requests_recovered: int  # of these, placed again
    laws_broken: int
    is_closing: bool
    waiting_tokens: int = 0  # of the prompts of all who wait, homeless ones included
    drained_requests_per_s: float = 0.0  # requests that left the queue for the rows, of late
    drained_tokens_per_s: float = 0.0  # and their tokens
    waiting_ranks: int = 0  # for the others of their worker group
    queue_timeouts: int = 0  # requests that waited too long to begin
    request_timeouts: int = 0  # requests whose time ran out
    poison_requests: int = 0  # requests that ended one worker after the other, and failed for it
    stale_messages: int = 0  # of leases that are over

    @property
    def can_produce(self) -> bool:
        """Whether some worker group has a lease that is in no doubt. It may be stuck all the same: see health.py."""
        return any(group.state is LeaseState.READY for group in self.groups)


def group_snapshot(home: Home) -> GroupSnapshot:
    """One home as it is now."""
    lease, scheduler = home.lease, home.scheduler
    pool, hello, memory = scheduler.pool, home.lease.hello, scheduler.memory
    sequences = [sequence for group in scheduler.line.running for sequence in group.live]
    pinned = [sequence for pin in scheduler.line.pinned for sequence in pin.live]
    counters = {field.name: getattr(scheduler.counters, field.name) for field in fields(Counters)}
    reasons = waiting_reasons(scheduler)
    return GroupSnapshot(
        name=hello.name,
        lease=lease.id,
        state=lease.state,
        ranks=len(lease.peers),
        pid=hello.pid,
        heard_at=lease.heard_at,
        beats_heard=lease.num_beats_heard,
        beats_sent=lease.num_beats_sent,
        block_size=scheduler.block_size,
        bytes_per_block=hello.layout.bytes_per_block,
        memory=hello.memory,
        max_len=scheduler.max_len,
        filled_slots=sum(sequence.num_computed for sequence in sequences),
        owned_slots=sum(sequence.capacity for sequence in sequences),
        tail_slots=tail_slots((*sequences, *pinned), pool, scheduler.block_size),
        running_requests=len(scheduler.line.running),
        waiting_requests=len(scheduler.line.waiting),
        running_sequences=len(sequences),
        flights=len(scheduler.flights),
        swapped_requests=sum(group.is_swapped for group in scheduler.line.waiting),
        preempted=dict(scheduler.line.preempted),
        waiting_tokens=scheduler.line.waiting.num_tokens,
        step_target_s=scheduler.pacing.target_s,
        decode_step_s=scheduler.pacing.decode_s,
        prefill_s_per_token=scheduler.pacing.token_s,
        preempted_waiting=len(scheduler.line.waiting.returned),
        preempted_by_recompute=scheduler.line.num_recomputed,
        preempted_by_swap=scheduler.line.num_swapped_out,
        swapped_in=scheduler.line.num_swapped_in,
        block_lifetimes_s=pool.lifetimes_s.spread(),
        block_idle_s=pool.idle_s.spread(),
        host_block_lifetimes_s=memory.host.lifetimes_s.spread(),
        host_block_idle_s=memory.host.idle_s.spread(),
        step_rows=scheduler.sizes.rows.spread(),
        step_positions=scheduler.sizes.positions.spread(),
        step_budget_use=scheduler.sizes.budget_use.spread(),
        step_flight_s=scheduler.sizes.flight_s.spread(),
        move_s_per_block=scheduler.costs.move_s_per_block,
        compute_s_per_token=scheduler.costs.compute_s_per_token,
        unanswered_since=scheduler.unanswered_since,
        grammars=scheduler.line.grammars.num_held,
        grammars_prepared=scheduler.line.grammars.num_prepared,
        grammars_failed=scheduler.line.grammars.num_failed,
        is_leaving=lease.is_leaving,
        **pool_figures(scheduler),
        **counters,
        **reasons,
    )


def pool_figures(scheduler: Scheduler) -> dict[str, int]:
    """Both tiers' blocks, by what has become of them."""
    pool, memory = scheduler.pool, scheduler.memory
    return {
        "num_blocks": pool.num_blocks,
        "free_blocks": pool.num_free,
        "cached_blocks": pool.num_cached,
        "owned_blocks": pool.num_owned,
        "quarantined_blocks": pool.num_quarantined,
        "shared_blocks": pool.num_shared,
        "shared_refs": pool.num_refs - pool.num_owned,
        "num_host_blocks": memory.host.num_blocks,
        "free_host_blocks": memory.host.num_free,
        "cached_host_blocks": memory.host.num_cached,
        "owned_host_blocks": memory.host.num_owned,
        "quarantined_host_blocks": memory.host.num_quarantined,
        "shared_host_blocks": memory.host.num_shared,
        "pinned_blocks": scheduler.line.num_pinned_blocks,
        "pinned_owned_blocks": len(set(scheduler.line.pinned_blocks)),
        "blocks_saved": memory.num_saved,
        "host_hits": memory.num_host_hits,
        "evictions": pool.num_evictions,
        "host_evictions": memory.host.num_evictions,
    }


def waiting_reasons(scheduler: Scheduler) -> dict[str, int]:
    """How many requests wait for what. Those behind somebody wait for what he waits for."""
    waiting = scheduler.line.waiting
    reasons = {"waiting_for_blocks": 0, "waiting_for_rows": 0, "waiting_for_budget": 0, "waiting_for_preempted": 0}
    reasons["waiting_for_prefix"] = len(waiting.aside)
    reasons["waiting_for_grammar"] = len(waiting.preparing)
    hold = f"waiting_for_{scheduler.admission.hold.value}"
    if waiting.returned:
        reasons["waiting_for_preempted"] = len(waiting.fresh)
        reasons[hold] += len(waiting.returned)
    else:
        reasons[hold] += len(waiting.fresh)
    return reasons
