"""The same figures under the names that vLLM gives them, so that dashboards made for it go on working.

    name                                    ours                        note
    num_requests_running                    kilburn_requests_running
    num_requests_waiting                    kilburn_requests_waiting    all reasons; swapped ones are counted apart
    num_requests_swapped                    kilburn_requests_swapped
    kv_cache_usage_perc                     kilburn_blocks              owned, of the device pool: 0 to 1, as vLLM's is
    gpu_cache_usage_perc, cpu_cache_usage_perc                          older names; the device and the host pool
    prefix_cache_queries_total, ..._hits_total   kilburn_prefix_*       tokens, both tiers
    num_preemptions_total                   kilburn_preemptions_total   both ways
    iteration_tokens_total                  kilburn_step_positions      a histogram, whatever its name says
    cache_config_info                       kilburn_group_info
    prompt_tokens_total, generation_tokens_total, request_success_total, time_to_first_token_seconds,
    inter_token_latency_seconds (and its older name time_per_output_token_seconds), e2e_request_latency_seconds,
    request_{queue,prefill,decode,inference}_time_seconds, request_{prompt,generation}_tokens,
    request_max_num_generation_tokens, request_params_{n,max_tokens}
                                            the edge's counts (counts.py), as under our own names

What has a meaning in vLLM only is not made up: there is no series for it. A label `engine` is the worker group's name.
"""

from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.controller.counts import Counts
from kilburn.controller.metrics_families import Figure, Kind, Values, single
from kilburn.shared.types import FinishReason

GAUGE, COUNTER, HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "abort",
    FinishReason.ERROR: "error",
}
if _REASONS.keys() != set(FinishReason):
    raise ValueError("a reason to finish without a name in vLLM's figures")


def _usage(group: GroupSnapshot) -> float:
    return group.owned_blocks / group.num_blocks


def _host_usage(group: GroupSnapshot) -> float:
    return group.owned_host_blocks / group.num_host_blocks if group.num_host_blocks else 0.0


def _success(counts: Counts) -> Values:
    return [((_REASONS[reason],), number) for reason, number in counts.finished.items()]


VLLM_ENGINE: tuple[Figure[GroupSnapshot], ...] = (
    Figure("num_requests_running", GAUGE, "requests in the batch", (), single(lambda g: g.running_requests)),
    Figure("num_requests_waiting", GAUGE, "requests that wait", (),
           single(lambda g: g.waiting_requests - g.swapped_requests)),
    Figure("num_requests_swapped", GAUGE, "requests swapped to the host", (), single(lambda g: g.swapped_requests)),
    Figure("kv_cache_usage_perc", GAUGE, "KV blocks in use, 1 being all", (), single(_usage)),
    Figure("gpu_cache_usage_perc", GAUGE, "KV blocks in use, 1 being all", (), single(_usage)),
    Figure("cpu_cache_usage_perc", GAUGE, "host KV blocks in use, 1 being all", (), single(_host_usage)),
    Figure("prefix_cache_queries", COUNTER, "tokens looked up in the prefix cache", (),
           single(lambda g: g.prefix_query_tokens)),
    Figure("prefix_cache_hits", COUNTER, "tokens found there", (), single(lambda g: g.prefix_hit_tokens)),
    Figure("gpu_prefix_cache_queries", COUNTER, "tokens looked up in the prefix cache", (),
           single(lambda g: g.prefix_query_tokens)),
    Figure("gpu_prefix_cache_hits", COUNTER, "tokens found there", (), single(lambda g: g.prefix_hit_tokens)),
    Figure("num_preemptions", COUNTER, "preemptions", (),
           single(lambda g: g.preempted_by_recompute + g.preempted_by_swap)),
    Figure("iteration_tokens_total", HISTOGRAM, "tokens in a step", (), single(lambda g: g.step_positions)),
    Figure("cache_config_info", GAUGE, "1; the pools", ("block_size", "num_gpu_blocks", "num_cpu_blocks"),
           lambda g: [((str(g.block_size), str(g.num_blocks), str(g.num_host_blocks)), 1)]),
)  # fmt: skip


VLLM_SERVICE: tuple[Figure[Counts], ...] = (
    Figure("prompt_tokens", COUNTER, "prompt tokens", (), single(lambda c: c.prompt_tokens)),
    Figure("generation_tokens", COUNTER, "generated tokens", (), single(lambda c: c.output_tokens)),
    Figure("prompt_tokens_cached", COUNTER, "prompt tokens found in the cache", (), single(lambda c: c.cached_tokens)),
    Figure("request_success", COUNTER, "requests that ended", ("finished_reason",), _success),
    Figure("time_to_first_token_seconds", HISTOGRAM, "to the first token", (),
           single(lambda c: c.first_token_s.spread())),
    Figure("inter_token_latency_seconds", HISTOGRAM, "between tokens", (), single(lambda c: c.inter_token_s.spread())),
    Figure("time_per_output_token_seconds", HISTOGRAM, "between tokens", (),
           single(lambda c: c.inter_token_s.spread())),
    Figure("e2e_request_latency_seconds", HISTOGRAM, "of whole requests", (),
           single(lambda c: c.end_to_end_s.spread())),
    Figure("request_queue_time_seconds", HISTOGRAM, "waiting to begin", (), single(lambda c: c.queue_s.spread())),
    Figure("request_prefill_time_seconds", HISTOGRAM, "from beginning to the first token", (),
           single(lambda c: c.prefill_s.spread())),
    Figure("request_decode_time_seconds", HISTOGRAM, "from the first token to the last", (),
           single(lambda c: c.decode_s.spread())),
    Figure("request_inference_time_seconds", HISTOGRAM, "from beginning to the last token", (),
           single(lambda c: c.inference_s.spread())),
    Figure("request_prompt_tokens", HISTOGRAM, "of a prompt", (), single(lambda c: c.prompt_lengths.spread())),
    Figure("request_max_num_generation_tokens", HISTOGRAM, "of an answer's longest sequence", (),
           single(lambda c: c.longest_lengths.spread())),
    Figure("request_params_max_tokens", HISTOGRAM, "asked for", (), single(lambda c: c.most_lengths.spread())),
    Figure("request_params_n", HISTOGRAM, "sequences asked for", (), single(lambda c: c.widths.spread())),
    Figure("request_generation_tokens", HISTOGRAM, "of an answer", (), single(lambda c: c.answer_lengths.spread())),
)  # fmt: skip
