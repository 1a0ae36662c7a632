"""The dashboards: overview for whoever uses the service; the others for whoever runs it.

Every panel says what it shows and what to do when it looks bad. Expressions are tried against a real Prometheus under a
load that makes each of them move (tests/system/test_dashboards.py).
"""

from grafana.panels import Dashboard, Look, Panel, Query, Section

NUMBER, STACKED, HEATMAP, TABLE = Look.NUMBER, Look.STACKED, Look.HEATMAP, Look.TABLE


def quantile(share: float, name: str, by: str = "", labels: str = "$I") -> str:
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({name}_bucket{{{labels}}}[$R])))"


def quantiles(name: str, labels: str = "$I") -> tuple[Query, ...]:
    """Median and tails of a histogram."""
    return tuple(Query(quantile(share, name, "", labels), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def spread(name: str, labels: str = "$I") -> Query:
    """A histogram as a heatmap: how many values fell between two edges."""
    return Query(f"sum by (le) (increase({name}_bucket{{{labels}}}[$R]))")


def rate(name: str, by: str = "", labels: str = "$G") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{labels}}}[$R]))"


OVERVIEW = Dashboard(
    "kilburn-overview", "Kilburn: overview", "Is it up, how fast is it, is there room?",
    (
        Section("Now", (
            Panel("Serving", "1 while tokens can be produced: a worker is ready and makes progress. At 0 look at "
                  "Workers and leases, and at the worker's log.", "none", Query("min(kilburn_up_to_serve{$I})"),
                  look=NUMBER, columns=4),
            Panel("Requests open", "Requests that were taken and have not ended. Rising without falling "
                  "back: more comes than is done; see Latency for what they wait for.", "short",
                  Query("sum(kilburn_requests{$I})"), look=NUMBER, columns=5),
            Panel("First token, p95", "Of the last interval. Users feel this one first; where it is high, see Latency "
                  "for whether requests queue or prompts take long.", "s",
                  Query(quantile(0.95, "kilburn_first_token_seconds")), look=NUMBER, columns=5),
            Panel("Tokens given", "Per second, to all clients together. Falls while requests are open: see Workers and "
                  "leases, Where a step's time goes.", "short",
                  Query("sum(rate(kilburn_output_tokens_total{$I}[$R]))"), look=NUMBER, columns=5),
            Panel("Pool in use", "Device blocks that somebody owns, of all. Near 100 % requests wait or are preempted: "
                  "raise --kv-memory or add a worker.", "percentunit",
                  Query('sum(kilburn_blocks{$G,tier="device",state="owned"}) / sum(kilburn_blocks{$G,tier="device"})'),
                  look=NUMBER, columns=5),
        )),
        Section("How fast", (
            Panel("Time to the first token", "From the request's arrival. If all lines rise together, requests queue: "
                  "add capacity. If only the tail does, long prompts are among them.", "s",
                  *quantiles("kilburn_first_token_seconds")),
            Panel("Time between tokens", "What a reader of a stream feels. Peaks are preemptions, or long prompts that "
                  "share steps with decoding: lower --step-target-ms.", "s",
                  *quantiles("kilburn_inter_token_seconds")),
            Panel("Tokens per second", "Prompt tokens of requests that began, those of them found in the cache, and "
                  "tokens given to clients.", "short",
                  Query("sum(rate(kilburn_prompt_tokens_total{$I}[$R]))", "prompt"),
                  Query("sum(rate(kilburn_cached_tokens_total{$I}[$R]))", "of it cached"),
                  Query("sum(rate(kilburn_output_tokens_total{$I}[$R]))", "output")),
            Panel("Requests running and waiting", "Waiting that does not fall back means more arrives than is done.",
                  "short", Query("sum(kilburn_requests_running{$G})", "running"),
                  Query("sum(kilburn_requests_queued{$I})", "waiting"),
                  Query("sum(kilburn_requests_swapped{$G})", "of it swapped")),
        )),
        Section("How it ends", (
            Panel("Requests finished", "By reason, per second. `error` is ours: look at the log. `cancelled`: the "
                  "client left, often since it had waited too long.", "reqps",
                  Query(rate("kilburn_requests_finished_total", "reason", "$I"), "{{reason}}"), look=STACKED),
            Panel("Requests refused", "By the code that the client was told, per second. queue_full: add capacity or "
                  "raise --max-waiting. Others are mistakes of clients, or limits that they meet.", "reqps",
                  Query(rate("kilburn_requests_refused_total", "reason", "$I"), "{{reason}}"), look=STACKED),
        )),
    ),
)  # fmt: skip

BLOCK_POOL = Dashboard(
    "kilburn-block-pool", "Kilburn: block pool", "Where the KV memory goes, block by block.",
    (
        Section("Occupancy", (
            Panel("Device blocks by state", "Free and cached ones can be taken. Owned near the top means a full pool; "
                  "quarantined is never right: a law was broken, see the log.", "short",
                  Query('sum by (state) (kilburn_blocks{$G,tier="device"})', "{{state}}"), look=STACKED),
            Panel("Host blocks by state", "Owned: copies of swapped requests. Cached: evicted blocks that may come "
                  "back. Always full and seldom hit: the host pool is larger than it need be.", "short",
                  Query('sum by (state) (kilburn_blocks{$G,tier="host"})', "{{state}}"), look=STACKED),
            Panel("Of the owned ones", "Shared by several sequences, pinned by named prefixes, copies of swapped "
                  "requests. Many pinned and a full pool: delete names, or lower --pinned-percent.", "short",
                  Query("sum by (tier, kind) (kilburn_blocks_of_which{$G})", "{{tier}}, {{kind}}")),
            Panel("True occupancy and waste", "Filled: slots of running sequences that have their KV, of those they "
                  "own. Tail waste: slots that no planned token fills; a long prompt that is still computed counts "
                  "with what it has yet to fill. Waste that stays over some percent: a smaller --block-size.",
                  "percentunit",
                  Query("sum(kilburn_filled_slots{$G}) / sum(kilburn_owned_slots{$G})", "filled"),
                  Query("avg(kilburn_tail_waste_ratio{$G})", "tail waste")),
            Panel("Sharing", "Blocks that sharing saves, of those that would be needed without. Zero although prompts "
                  "have much in common: their beginnings differ (a date, a name), or salts keep them apart.",
                  "percentunit", Query("avg by (group) (kilburn_sharing_ratio{$G})", "{{group}}")),
            Panel("Copies on write", "Blocks copied since a sequence wrote what others hold: at forks of n > 1, in "
                  "beam search, and behind named prefixes. Many in every step cost the worker time: ask for fewer "
                  "beams or choices.", "ops",
                  Query(rate("kilburn_block_copies_total"), "copies")),
        )),
        Section("The prefix cache", (
            Panel("Tokens looked up and found", "Found on the device, or brought back from the host. What is not found "
                  "is computed.", "short", Query(rate("kilburn_prefix_query_tokens_total"), "looked up"),
                  Query(rate("kilburn_prefix_hit_tokens_total", "tier"), "found, {{tier}}")),
            Panel("Hit rate", "Low, with evictions: a larger pool or a host pool would help. Low without them: prompts "
                  "have little in common.", "percentunit",
                  Query(f'{rate("kilburn_prefix_hit_tokens_total")} / {rate("kilburn_prefix_query_tokens_total")}',
                        "hit rate")),
            Panel("Evictions", "Cached blocks taken for something else. Harmless as long as they were not wanted any "
                  "more: see their idle time.", "ops", Query(rate("kilburn_evictions_total", "tier"), "{{tier}}")),
            Panel("Traffic with the host pool", "Evicted blocks that were kept there, and blocks that came back by "
                  "their names. Much kept and little back: the host pool does not pay.", "ops",
                  Query(rate("kilburn_host_saved_blocks_total"), "kept"),
                  Query(rate("kilburn_host_hit_blocks_total"), "came back")),
            Panel("Life of evicted blocks", "From being taken to eviction. Short lives: the pool turns over before "
                  "anything can be found again.", "s", spread("kilburn_block_lifetime_seconds", "$G"), look=HEATMAP),
            Panel("Idle time of evicted blocks", "From their last owner to eviction: how long something stays in the "
                  "cache. Shorter than the pause between the turns of a chat: a larger pool would be hit more.", "s",
                  spread("kilburn_block_idle_seconds", "$G"), look=HEATMAP),
        )),
        Section("Preemption and swap", (
            Panel("Preemptions", "By how they left and by what decided it. no_room: the host pool is too small. Many "
                  "of any kind: more is admitted than fits; raise --kv-memory or lower --max-rows.", "ops",
                  Query(rate("kilburn_preemptions_total", "mode, reason"), "{{mode}}, {{reason}}"), look=STACKED),
            Panel("What a preemption costs", "Seconds of the worker's time for each one that came back: what was "
                  "predicted, and the truth. Far apart for long: tell us.", "s",
                  Query('sum by (mode, what) (rate(kilburn_preemption_seconds_total{$G}[$R])) / ignoring (what) '
                        'group_left sum by (mode) (rate(kilburn_preemptions_returned_total{$G}[$R]))',
                        "{{mode}}, {{what}}")),
            Panel("Swap bandwidth", "Bytes that moved between the pools, each way. At the limit of the link (PCIe) "
                  "requests wait for their blocks: lower --max-rows, or raise --kv-memory.", "Bps",
                  Query(rate("kilburn_swap_bytes_total", "direction"), "{{direction}}")),
            Panel("Time of moves", "The worker's seconds per second for swaps and copies. Near 1 it does nothing else: "
                  "a smaller host pool, or --preemption recompute.", "percentunit",
                  Query(rate("kilburn_move_seconds_total", "direction"), "{{direction}}")),
            Panel("Blocks swapped", "Swap traffic in blocks, each way. Far more out than in for long: requests "
                  "leave faster than they come back.", "ops",
                  Query(rate("kilburn_swap_blocks_total", "direction"), "{{direction}}")),
            Panel("What the choice goes by", "What this worker has shown a moved block and a computed token to take. A "
                  "block that takes longer than its tokens: swapping does not pay, and auto recomputes.", "s",
                  Query("avg by (group) (kilburn_move_block_seconds{$G})", "a block, {{group}}"),
                  Query("avg by (group) (kilburn_compute_token_seconds{$G})", "a token, {{group}}")),
        )),
    ),
)  # fmt: skip

LATENCY = Dashboard(
    "kilburn-latency", "Kilburn: latency", "Where a request's time goes.",
    (
        Section("To the first token", (
            Panel("Time to the first token", "All of them: a second band above the first is requests that queued.",
                  "s", spread("kilburn_first_token_seconds"), look=HEATMAP),
            Panel("Queue", "From arrival to the first step. Rises before anything else when there is too little room.",
                  "s", *quantiles("kilburn_request_queue_seconds")),
            Panel("Prefill", "From the first step to the first token. Long: long prompts, a low --max-step-tokens, or "
                  "a prefix cache that finds little.", "s", *quantiles("kilburn_request_prefill_seconds")),
            Panel("Waiting, by reason", "What those who wait, wait for. blocks: memory; rows: --max-rows; budget: "
                  "--max-step-tokens; preempted: one that was preempted goes first; prefix: somebody computes it.",
                  "short", Query("sum by (reason) (kilburn_requests_waiting{$G})", "{{reason}}"), look=STACKED),
            Panel("Tokens that wait", "Known tokens of those who wait: the work before the last of them. High with "
                  "few who wait: long prompts; bound them with --max-waiting-tokens, or add workers.", "short",
                  Query("sum(kilburn_waiting_tokens{$G})", "tokens")),
            Panel("Prompt lengths", "Of requests that began. Where they have become longer, so has everything before "
                  "the first token.", "short", *quantiles("kilburn_request_prompt_tokens")),
        )),
        Section("From there on", (
            Panel("Time between tokens", "All of them. Bands far above the first are preemptions, or steps with long "
                  "prompts.", "s",
                  spread("kilburn_inter_token_seconds"), look=HEATMAP),
            Panel("Decode", "From the first token to the last: the length of answers times the time between "
                  "tokens.", "s", *quantiles("kilburn_request_decode_seconds")),
            Panel("End to end", "From arrival to the last token. Depends on how long answers are.", "s",
                  *quantiles("kilburn_request_seconds")),
            Panel("Answer lengths", "Tokens of finished requests, all their sequences together. Long ones hold "
                  "blocks for long.", "short",
                  *quantiles("kilburn_request_output_tokens")),
            Panel("Where time goes", "Seconds per second that requests spend queueing, in prefill and decoding: the "
                  "number of requests that do so on average. Mostly queue: add room or workers; mostly prefill: "
                  "prompts are long or seldom cached.", "short",
                  Query("sum(rate(kilburn_request_queue_seconds_sum{$I}[$R]))", "queue"),
                  Query("sum(rate(kilburn_request_prefill_seconds_sum{$I}[$R]))", "prefill"),
                  Query("sum(rate(kilburn_request_decode_seconds_sum{$I}[$R]))", "decode"), look=STACKED),
            Panel("Streams and their readers", "Answers that somebody waits for, and text that readers of streams have "
                  "not taken. The outbox grows where clients or proxies read slowly.", "short",
                  Query("sum(kilburn_streams_open{$I})", "open"),
                  Query("sum(kilburn_outbox_characters{$I})", "characters in the outbox")),
        )),
    ),
)  # fmt: skip

WORKERS = Dashboard(
    "kilburn-workers", "Kilburn: workers and leases", "Who computes, what a step is made of, what was lost.",
    (
        Section("Leases", (
            Panel("Leases by state", "suspect: silent for half of what is allowed. None ready: nothing is served.",
                  "short", Query("sum by (state) (kilburn_leases{$I})", "{{state}}"), look=STACKED),
            Panel("Leases given and ended", "Within the last interval. Ends that nobody asked for: look for the "
                  "reason in the log.", "short",
                  Query("sum(increase(kilburn_leases_began_total{$I}[$R]))", "given"),
                  Query("sum(increase(kilburn_leases_ended_total{$I}[$R]))", "ended")),
            Panel("Silence", "Since each worker group was last heard. Should stay near --beat-seconds; at "
                  "--silence-seconds its lease ends.", "s",
                  Query("max by (group) (kilburn_lease_silence_seconds{$G})", "{{group}}")),
            Panel("Requests that lost their worker", "How many had to leave, how many found a place again, how many "
                  "wait for a worker now.", "short",
                  Query("sum(increase(kilburn_requests_displaced_total{$I}[$R]))", "displaced"),
                  Query("sum(increase(kilburn_requests_recovered_total{$I}[$R]))", "placed again"),
                  Query("sum(kilburn_requests_homeless{$I})", "waiting for a worker")),
            Panel("Beats", "From and to workers, per second. Those that come should be as many as go: fewer are "
                  "on a bad link.", "ops", Query(rate("kilburn_beats_total", "direction"),
                  "{{direction}}")),
            Panel("Laws broken", "Faults found by our own accounting. More than 0 is a bug: keep the log, and tell us.",
                  "none", Query("sum(kilburn_laws_broken_total{$I})"), look=NUMBER),
        )),
        Section("Steps", (
            Panel("Where a step's time goes", "Seconds per second. The worker idles where the controller (plan, wire) "
                  "is too slow or nothing is asked; forward should be most of the rest.", "percentunit",
                  Query(rate("kilburn_worker_seconds_total", "phase"), "worker, {{phase}}"),
                  Query(rate("kilburn_controller_seconds_total", "phase", "$I"), "controller, {{phase}}")),
            Panel("Steps", "Steps planned, per second. Few, with requests running: steps are long, or the "
                  "worker is stuck.", "ops", Query(rate("kilburn_steps_total", "group"),
                  "{{group}}")),
            Panel("A step's flight", "From sending a plan to committing its result; up to --depth of them overlap.",
                  "s", *quantiles("kilburn_step_flight_seconds", "$G")),
            Panel("Batch", "Sequences in a step. Always 1: clients ask one after the other. Always --max-rows: raise "
                  "it, if the pool has room.", "short", *quantiles("kilburn_step_rows", "$G")),
            Panel("Positions in a step", "Tokens computed at once; chunks of prompts are the high ones.", "short",
                  spread("kilburn_step_positions", "$G"), look=HEATMAP),
            Panel("Use of the budget", "Positions in a step, of --max-step-tokens. At 1 prompts wait for each other.",
                  "percentunit",
                  Query(f'{rate("kilburn_step_budget_ratio_sum")} / {rate("kilburn_step_budget_ratio_count")}', "mean"),
                  Query(quantile(0.5, "kilburn_step_budget_ratio", "", "$G"), "p50")),
            Panel("Sequences and flights", "Sequences in the batch, and plans under way. Flights that stay at 0 or "
                  "1 with --depth above 1: the controller plans too late; see its processor below.", "short",
                  Query("sum(kilburn_sequences_running{$G})", "sequences"),
                  Query("sum(kilburn_flights{$G})", "flights")),
            Panel("Tokens computed", "Prompt tokens of requests that began, and tokens drawn, per second.", "short",
                  Query(rate("kilburn_step_prompt_tokens_total"), "prompt"),
                  Query(rate("kilburn_step_generated_tokens_total"), "drawn")),
        )),
        Section("The wire and the process", (
            Panel("Bytes on the wire", "Between controller and workers. Tokens and blocks only, no KV: "
                  "megabytes are a surprise.", "Bps",
                  Query("sum(rate(kilburn_link_bytes_in_total{$I}[$R]))", "in"),
                  Query("sum(rate(kilburn_link_bytes_out_total{$I}[$R]))", "out")),
            Panel("What does not belong there", "Frames that were no messages, and messages of peers without a lease, "
                  "within the last interval. More than a few: who connects to --bind?", "short",
                  Query("sum by (kind) (increase(kilburn_link_garbage_total{$I}[$R]))", "garbage, {{kind}}"),
                  Query("sum(increase(kilburn_link_strangers_total{$I}[$R]))", "strangers")),
            Panel("Connections", "Of workers, that greeted the controller, and that ended. Without deaths of workers "
                  "both stay at 0: otherwise the network between them breaks off, see the workers' logs.", "short",
                  Query("sum(increase(kilburn_link_handshakes_total{$I}[$R]))", "greeted"),
                  Query("sum(increase(kilburn_link_connections_ended_total{$I}[$R]))", "ended")),
            Panel("The controller's memory", "Resident. It follows the requests that are open; growing without them is "
                  "a leak: keep the log, and tell us.", "bytes",
                  Query("sum(kilburn_process_resident_memory_bytes{$I})", "memory")),
            Panel("The controller's processor", "Of one core, as a share. Near 100 % the controller is what limits "
                  "throughput: a faster core, or several controllers.", "percentunit",
                  Query("sum(rate(kilburn_process_cpu_seconds_total{$I}[$R]))", "processor")),
            Panel("Memory of workers", "By the rows of their ledger; it does not change while they run. `kilburn plan` "
                  "says what would fit.", "bytes",
                  Query("sum by (group, part) (kilburn_memory_bytes{$G})", "{{group}}, {{part}}"), look=STACKED),
            Panel("What runs here", "Versions and settings, which do not change while it runs.", "none",
                  Query("kilburn_build_info{$I}"), Query("kilburn_config_info{$I}"), Query("kilburn_group_info{$G}"),
                  look=TABLE, columns=24),
        )),
    ),
)  # fmt: skip

REGISTRY = Dashboard(
    "kilburn-registry", "Kilburn: registry", "What controllers tell each other through Redis.",
    (
        Section("Prefix registry", (
            Panel("Registry answers", "1 while Redis answers. At 0 serving goes on; prefixes of other controllers are "
                  "not seen.", "none", Query("min(kilburn_registry_up{$I})", "up")),
            Panel("Time of a turn", "Writing what is new and reading the names. Seconds: Redis is slow, or far away.",
                  "s", *quantiles("kilburn_registry_turn_seconds")),
            Panel("Turns that failed", "Redis did not answer in time, or with an error. More than now and then: "
                  "look at Redis and the network to it; hits on what others hold are lost meanwhile.", "ops",
                  Query("sum(rate(kilburn_registry_failures_total{$I}[$R]))", "failures")),
            Panel("Entries sent", "Hints and names that Redis took, and hints that were dropped since it did not.",
                  "ops", Query("sum(rate(kilburn_registry_sent_total{$I}[$R]))", "sent"),
                  Query("sum(rate(kilburn_registry_dropped_total{$I}[$R]))", "dropped")),
            Panel("Names", "Named prefixes that the registry holds, of all controllers. A sudden fall: Redis was "
                  "flushed or began anew; only growing: delete names that nobody uses.", "short",
                  Query("max(kilburn_registry_names{$I})", "names")),
            Panel("Entries not believed", "Not signed with our key, or senseless. Controllers with another "
                  "--server-key-file, or somebody who writes into this Redis.", "ops",
                  Query("sum(rate(kilburn_registry_ignored_total{$I}[$R]))", "ignored")),
        )),
    ),
)  # fmt: skip

GATEWAY = Dashboard(
    "kilburn-gateway", "Kilburn: gateway", "Which controllers there are before clients, and who is asked for what.",
    (
        Section("Controllers", (
            Panel("Controllers known", "By what they last said to a probe. Unready ones admit nothing now; of lost "
                  "ones nothing is heard: look at their machines.", "short",
                  Query("sum by (state) (kilburn_gateway_controllers)", "{{state}}"), look=STACKED),
            Panel("Requests under way", "That gateways have with controllers. Far apart between controllers: prefixes "
                  "keep them where they are, or one of them is slow.", "short",
                  Query("sum by (controller) (kilburn_gateway_controller_requests)", "{{controller}}")),
        )),
        Section("Who is asked", (
            Panel("What chose the controller", "Requests whose controller was chosen for what it has computed of their "
                  "prompt, and for having the least to do. No prefixes at all: does the registry answer?", "ops",
                  Query("sum by (by) (rate(kilburn_gateway_requests_routed_total[$R]))", "by {{by}}")),
            Panel("Tokens of prompts", "All, and those that the controller asked first was said to have computed.",
                  "short", Query("sum(rate(kilburn_gateway_prompt_tokens_total[$R]))", "prompts"),
                  Query("sum(rate(kilburn_gateway_hit_tokens_total[$R]))", "computed before")),
            Panel("Registry hits", "Blocks of prompts that the registry was asked about: who holds them was known, or "
                  "not. Only misses with prompts that repeat: compare --server-key-file of all processes.", "ops",
                  Query("sum by (result) (rate(kilburn_gateway_registry_lookups_total[$R]))", "{{result}}")),
        )),
        Section("What went wrong", (
            Panel("Tried elsewhere", "Requests that another controller was asked for, before any token. Clients notice "
                  "nothing; many of them mean that controllers are full, or come and go.", "ops",
                  Query("sum(rate(kilburn_gateway_requests_retried_total[$R]))", "tries")),
            Panel("Streams broken off", "That ended with an error event, as their controller was lost after the first "
                  "token. Each is a controller that died: see its log.", "short",
                  Query("sum(increase(kilburn_gateway_streams_broken_total[$R]))", "streams")),
            Panel("No controller", "Requests that no controller took: clients got a 503. Controllers are missing, or "
                  "cannot be reached from the gateways.", "short",
                  Query("sum(increase(kilburn_gateway_requests_unanswered_total[$R]))", "requests")),
        )),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, BLOCK_POOL, LATENCY, WORKERS, REGISTRY, GATEWAY)
