"""The figures of one worker group: its blocks, its work, its lease. All but their names are fields of its snapshot.

Counters of a group begin anew with each of its leases, as those of any restarted process do.
"""

from kilburn.controller.core.departure import Way, Why
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.controller.metrics_families import Figure, Kind, Values, single

GAUGE, COUNTER, HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM


def _blocks(group: GroupSnapshot) -> Values:
    return [
        (("device", "free"), group.free_blocks),
        (("device", "cached"), group.cached_blocks),
        (("device", "owned"), group.owned_blocks),
        (("device", "quarantined"), group.quarantined_blocks),
        (("host", "free"), group.free_host_blocks),
        (("host", "cached"), group.cached_host_blocks),
        (("host", "owned"), group.owned_host_blocks),
        (("host", "quarantined"), group.quarantined_host_blocks),
    ]


def _of_which(group: GroupSnapshot) -> Values:
    return [
        (("device", "shared"), group.shared_blocks),
        (("device", "pinned"), group.pinned_owned_blocks),
        (("host", "shared"), group.shared_host_blocks),
        (("host", "swapped"), group.owned_host_blocks),
    ]


def _sharing(group: GroupSnapshot) -> float:
    without = group.owned_blocks + group.shared_refs
    return group.shared_refs / without if without else 0.0


def _waiting(group: GroupSnapshot) -> Values:
    return [
        (("blocks",), group.waiting_for_blocks),
        (("rows",), group.waiting_for_rows),
        (("budget",), group.waiting_for_budget),
        (("preempted",), group.waiting_for_preempted),
        (("prefix",), group.waiting_for_prefix),
        (("grammar",), group.waiting_for_grammar),
    ]


def _hits(group: GroupSnapshot) -> Values:
    host = group.prefix_host_hit_tokens
    return [(("device",), group.prefix_hit_tokens - host), (("host",), host)]


def _preemptions(group: GroupSnapshot) -> Values:
    ways = {
        (way, why): 0 for way in Way for why in Why if way is Way.RECOMPUTE or why in (Why.CHEAPER, Why.SETTING)
    } | group.preempted
    return [((way.value, why.name.lower()), number) for (way, why), number in ways.items()]


def _returns(group: GroupSnapshot) -> Values:
    return [(("recompute",), group.returned_by_recompute), (("swap",), group.returned_by_swap)]


def _costs(group: GroupSnapshot) -> Values:
    return [
        (("recompute", "predicted"), group.predicted_recompute_s),
        (("recompute", "actual"), group.actual_recompute_s),
        (("swap", "predicted"), group.predicted_swap_s),
        (("swap", "actual"), group.actual_swap_s),
    ]


def _compared(group: GroupSnapshot) -> Values:
    return [(("recompute",), group.compared_recompute_s), (("swap",), group.compared_swap_s)]


def _swap_blocks(group: GroupSnapshot) -> Values:
    return [(("out",), group.blocks_out), (("in",), group.blocks_in)]


def _swap_bytes(group: GroupSnapshot) -> Values:
    return [(("out",), group.bytes_out), (("in",), group.bytes_in)]


def _memory(group: GroupSnapshot) -> Values:
    memory = group.memory
    return [
        (("weights",), memory.weights),
        (("activations",), memory.activations),
        (("logits",), memory.logits),
        (("buffers",), memory.buffers),
        (("graphs",), memory.graphs),
        (("kv_pool",), group.num_blocks * group.bytes_per_block),
        (("host_pool",), group.num_host_blocks * group.bytes_per_block),
    ]


def _move_seconds(group: GroupSnapshot) -> Values:
    return [(("out",), group.swap_out_s), (("in",), group.swap_in_s), (("copy",), group.copy_s)]


def _seconds(group: GroupSnapshot) -> Values:
    return [
        (("idle",), group.worker_idle_s),
        (("apply",), group.worker_apply_s),
        (("forward",), group.worker_forward_s),
        (("sample",), group.worker_sample_s),
    ]


def _info(group: GroupSnapshot) -> Values:
    sizes = (group.block_size, group.num_blocks, group.num_host_blocks, group.max_len, group.ranks)
    return [(tuple([str(size) for size in sizes]), 1)]


GROUP_FIGURES: tuple[Figure[GroupSnapshot], ...] = (
    Figure("group_info", GAUGE, "1; what a worker group announced",
           ("block_size", "blocks", "host_blocks", "max_len", "ranks"), _info),
    # --- memory
    Figure("blocks", GAUGE, "blocks of KV by tier and state; the four states sum to the pool", ("tier", "state"),
           _blocks),
    Figure("blocks_of_which", GAUGE, "owned blocks that several tables hold, that named prefixes hold, that are copies "
           "of swapped requests", ("tier", "kind"), _of_which),
    Figure("pinned_blocks", GAUGE, "blocks that named prefixes hold, or will once they are computed", (),
           single(lambda g: g.pinned_blocks)),
    Figure("saved_blocks", GAUGE, "blocks that sharing saves: table entries beyond the first of each block", (),
           single(lambda g: g.shared_refs)),
    Figure("sharing_ratio", GAUGE, "blocks that sharing saves, of those needed without it", (), single(_sharing)),
    Figure("owned_slots", GAUGE, "token positions that the blocks of running sequences have room for", (),
           single(lambda g: g.owned_slots)),
    Figure("filled_slots", GAUGE, "of these, positions that have their KV", (), single(lambda g: g.filled_slots)),
    Figure("tail_slots", GAUGE, "slots at the ends of owned blocks that nothing planned will fill, each block once", (),
           single(lambda g: g.tail_slots)),
    Figure("tail_waste_ratio", GAUGE, "these, of the slots of all owned blocks", (), single(lambda g: g.tail_waste)),
    Figure("block_copies", COUNTER, "blocks copied on write", (), single(lambda g: g.block_copies)),
    Figure("evictions", COUNTER, "cached blocks that lost their names to somebody else", ("tier",),
           lambda g: [(("device",), g.evictions), (("host",), g.host_evictions)]),
    Figure("block_lifetime_seconds", HISTOGRAM, "of evicted blocks: from being taken to eviction", ("tier",),
           lambda g: [(("device",), g.block_lifetimes_s), (("host",), g.host_block_lifetimes_s)]),
    Figure("block_idle_seconds", HISTOGRAM, "of evicted blocks: from their last owner to eviction", ("tier",),
           lambda g: [(("device",), g.block_idle_s), (("host",), g.host_block_idle_s)]),
    Figure("memory_bytes", GAUGE, "memory of the worker, by the rows of its ledger", ("part",), _memory),
    # --- prefixes
    Figure("prefix_query_tokens", COUNTER, "known tokens of sequences when they were admitted", (),
           single(lambda g: g.prefix_query_tokens)),
    Figure("prefix_hit_tokens", COUNTER, "of these, tokens that need not be computed, by the tier that had them",
           ("tier",), _hits),
    # --- preemption and swap
    Figure("preemptions", COUNTER, "requests that had to give up their blocks, by how they left and by what decided it",
           ("mode", "reason"), _preemptions),
    Figure("preemptions_returned", COUNTER, "preempted requests that had again all that they had", ("mode",),
           _returns),
    Figure("preemption_seconds", COUNTER, "worker seconds that these preemptions were predicted to take, and took",
           ("mode", "what"), _costs),
    Figure("preemption_predicted_seconds", COUNTER, "worker seconds that either way was predicted to take, of all "
           "preemptions that this comparison decided", ("mode",), _compared),
    Figure("move_block_seconds", GAUGE, "what a block moved between the tiers is expected to take", (),
           single(lambda g: g.move_s_per_block)),
    Figure("compute_token_seconds", GAUGE, "what a prompt token is expected to take", (),
           single(lambda g: g.compute_s_per_token)),
    Figure("swapped_in", COUNTER, "requests that came back from the host pool", (), single(lambda g: g.swapped_in)),
    Figure("swap_blocks", COUNTER, "blocks moved between the pools", ("direction",), _swap_blocks),
    Figure("swap_bytes", COUNTER, "the same in bytes", ("direction",), _swap_bytes),
    Figure("move_seconds", COUNTER, "the worker's time for moves of blocks; a step that moves both ways is divided by "
           "blocks", ("direction",), _move_seconds),
    Figure("host_saved_blocks", COUNTER, "evicted blocks that the host pool kept", (),
           single(lambda g: g.blocks_saved)),
    Figure("host_saved_bytes", COUNTER, "the same in bytes", (), single(lambda g: g.bytes_saved)),
    Figure("host_hit_blocks", COUNTER, "blocks that came back from there by their names", (),
           single(lambda g: g.host_hits)),
    Figure("host_hit_bytes", COUNTER, "the same in bytes", (), single(lambda g: g.bytes_hit)),
    # --- work
    Figure("requests_running", GAUGE, "requests on the rows, named prefixes being computed included", (),
           single(lambda g: g.running_requests)),
    Figure("requests_waiting", GAUGE, "requests placed here that wait, by what holds them up", ("reason",), _waiting),
    Figure("requests_swapped", GAUGE, "of these, requests whose blocks are on the host", (),
           single(lambda g: g.swapped_requests)),
    Figure("waiting_tokens", GAUGE, "known tokens of those who wait", (), single(lambda g: g.waiting_tokens)),
    Figure("requests_preempted_waiting", GAUGE, "of those who wait, requests that were preempted before", (),
           single(lambda g: g.preempted_waiting)),
    Figure("step_target_seconds", GAUGE, "how long a step is to take at most; 0: as long as its tokens take", (),
           single(lambda g: g.step_target_s)),
    Figure("decode_step_seconds", GAUGE, "learned: what a step without prompts takes", (),
           single(lambda g: g.decode_step_s)),
    Figure("prefill_token_seconds", GAUGE, "learned: what a prompt's token adds to a step", (),
           single(lambda g: g.prefill_s_per_token)),
    Figure("sequences_running", GAUGE, "sequences in the batch", (), single(lambda g: g.running_sequences)),
    Figure("flights", GAUGE, "plans under way", (), single(lambda g: g.flights)),
    Figure("steps", COUNTER, "steps planned", (), single(lambda g: g.steps)),
    Figure("step_rows", HISTOGRAM, "sequences in a step", (), single(lambda g: g.step_rows)),
    Figure("step_positions", HISTOGRAM, "token positions computed in a step", (), single(lambda g: g.step_positions)),
    Figure("step_budget_ratio", HISTOGRAM, "positions in a step, of those that may be", (),
           single(lambda g: g.step_budget_use)),
    Figure("step_flight_seconds", HISTOGRAM, "from sending a plan to committing its result", (),
           single(lambda g: g.step_flight_s)),
    Figure("worker_seconds", COUNTER, "the worker's time: idle, applying plans, forward, sampling", ("phase",),
           _seconds),
    Figure("step_prompt_tokens", COUNTER, "prompt tokens of requests that began", (),
           single(lambda g: g.prompt_tokens)),
    Figure("step_generated_tokens", COUNTER, "tokens drawn", (), single(lambda g: g.generated_tokens)),
    # --- the lease
    Figure("beats", COUNTER, "beats, by direction", ("direction",),
           lambda g: [(("in",), g.beats_heard), (("out",), g.beats_sent)]),
)  # fmt: skip
