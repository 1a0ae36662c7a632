"""Recorded traffic on one H100 with a model of today, a second tier of memory, and whose turn it is.

Loads are the first minutes of each trace at its own pace, or faster; a prompt that a trace says begins like another is
found in the cache if it is there. What an endless cache would have found is counted from the trace alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from bench.paper_data import (
    AZURE,
    CLIENTS,
    GPU,
    MODEL_OF_TODAY,
    MOONCAKE,
    SHAREGPT,
    Data,
    outcomes,
    poisson_run,
    replay,
    served,
    setup_of,
)
from bench.paper_shape import MINUTE_S, Figure, Panel, Tell
from kilburn.controller.simulate.demand import Decoding, best_hit_share, cut
from kilburn.controller.simulate.devices import DEVICES
from kilburn.controller.simulate.outcome import Outcome
from kilburn.controller.simulate.record import spread
from kilburn.controller.simulate.roofline import Load
from kilburn.controller.simulate.servegen import draw_requests, read_clients
from kilburn.controller.simulate.sizing import Run, Setup, run_all
from kilburn.controller.simulate.traces import Asked

LONGEST = 98_304  # tokens of a request of Mooncake; longer ones are cut
PACE, WHOLE_MIN = 0.25, 88  # of Mooncake's traces, and minutes until all of them has come
SESSIONS = "ShareGPT, questions a minute apart"
POOLS = (100_000, 400_000, 1_600_000, 6_400_000)  # slots of the device
DEVICE_POOL, HOSTS = 200_000, (0, 400_000, 1_600_000, 6_400_000)  # slots of the device, and of the host beside it
PART = 4  # of a pool of Mooncake's, that of ShareGPT's
NEAR, FAR = 64e9, 4e9  # bytes a second between them


def alone_s(setup: Setup, asked: Sequence[Asked]) -> dict[str, float]:
    """Seconds to the first token if nobody else were there: what is best possible for these prompts."""
    seconds = []
    for one in asked:
        left, done, total = one.num_prompt, 0, 0.0
        while left:
            num = min(left, setup.max_step_tokens)
            load = Load(num_chunks=1, num_chunk_tokens=num, num_chunk_cells=done, num_sampled=1)
            load.num_pairs = num * done + num * (num + 1) // 2
            total += setup.machine.seconds(load)[1]
            left, done = left - num, done + num
        seconds.append(total)
    return spread(seconds)


def preempted(one: Outcome) -> int:
    return one.preempted_swap + one.preempted_recompute


def figure_azure(data: Data, tell: Tell) -> Figure:
    """Latencies of the recorded hour's beginning, and of ServeGen's clients, whose requests come in bursts."""
    seconds, loads = 5 * MINUTE_S * data.share, list[tuple[str, str, list[Asked]]]()
    for name, file in AZURE.items():
        for speed in (1.0, 2.0, 4.0):
            loads.append((name, f"{speed:g} x its pace", replay(data, file, speed, 5)))
    for name, folder in CLIENTS.items():
        for rate in (2.0, 6.0):
            asked = draw_requests(read_clients(data.path(folder)), seconds, rate, seed=1)
            loads.append((name, f"{rate:g} requests/s", [cut(one, 32_768) for one in asked]))
    found = outcomes(data, [Run(served(), asked) for _, _, asked in loads], tell)
    rows, panel = [], Panel("", "", "p99 to the first token, s", kind="groups")
    for (name, pace, asked), one in zip(loads, found, strict=True):
        best = alone_s(served(), asked)
        rows.append([name, pace, f"{one.num_requests}", f"{one.first_s['p50']:.3f}", f"{best['p50']:.3f}",
                     f"{one.first_s['p99']:.2f}", f"{best['p99']:.2f}", f"{1e3 * one.gap_s['p50']:.1f}",
                     f"{1e3 * one.gap_s['p99']:.1f}", f"{1e3 * one.normalized_s['mean']:.0f}", f"{one.mean_rows:.1f}",
                     f"{preempted(one)}", f"{100 * one.tail_waste:.1f}"])  # fmt: skip
        panel.names.append(f"{name}, {pace}")
        panel.bar("here", one.first_s["p99"])
        panel.bar("with the device to itself", best["p99"])
    heads = ["trace", "pace", "requests", "first token p50, s", "best", "p99", "best", "gap p50, ms", "p99",
             "ms/token", "rows", "preempted", "tail waste %"]  # fmt: skip
    notes = ["Best is what the same prompts would take if each had the device to itself, by the same roofline."]
    setup = f"{MODEL_OF_TODAY}, 400k slots in blocks of 16; the first {seconds:.0f} s of each"
    return Figure("figure-azure", "Recorded traffic: latencies", setup, heads, rows, [panel], notes,
                  ", ".join([*AZURE.values(), *CLIENTS]))  # fmt: skip


def prefix_loads(data: Data) -> dict[str, tuple[list[Asked], int]]:
    """Requests that begin alike, and the size of blocks that suits them."""
    found = {name: (replay(data, file, PACE, WHOLE_MIN, max_len=LONGEST), 64) for name, file in MOONCAKE.items()}
    found[SESSIONS] = (data.sessions(2.0, 12 * MINUTE_S * data.share, 60.0, 8192), 16)
    return found


def told_of(data: Data, loads: dict[str, tuple[list[Asked], int]]) -> list[str]:
    """What was replayed."""
    each = [f"{name} {len(asked):,} of {fmean(a.num_prompt for a in asked):,.0f}" for name, (asked, _) in loads.items()]
    covered_s = WHOLE_MIN * MINUTE_S * PACE * data.share
    return [
        f"Requests and their prompt tokens: {', '.join(each)}. Of Mooncake's traces the first {covered_s:,.0f} s at a "
        f"quarter of their pace, which is that of a cluster; prompts beyond {LONGEST:,} tokens are cut. ShareGPT: two "
        "conversations begin in a second, and each question comes with all that was said before it.",
    ]


def figure_prefixes(data: Data, tell: Tell) -> Figure:
    """Prefixes found, against the size of the device's pool."""
    rows, panels, loads = [], [], prefix_loads(data)
    for name, (asked, size) in loads.items():
        best = best_hit_share(asked, size)
        sizes = POOLS if name in MOONCAKE else tuple(pool // PART for pool in POOLS)
        found = outcomes(data, [Run(served(size, tokens, max_len=LONGEST), asked) for tokens in sizes], tell)
        panel = Panel(name, "thousand slots of the device's pool", "of the prompt tokens found, %", kind="log x")
        for tokens, one in zip(sizes, found, strict=True):
            alone = best_hit_share(asked, size, num_blocks=tokens // size)
            panel.add("found", tokens / 1000, 100 * one.hit_share)
            panel.add("by a cache of this size alone", tokens / 1000, 100 * alone)
            panel.add("by an endless cache", tokens / 1000, 100 * best)
            rows.append([name, f"{tokens:,}", f"{100 * one.hit_share:.1f}", f"{100 * alone:.1f}", f"{100 * best:.1f}",
                         *(f"{one.first_s[p]:.2f}" for p in ("p50", "p90", "p99")), f"{1e3 * one.gap_s['p50']:.1f}",
                         f"{1e3 * one.gap_s['p99']:.1f}", f"{preempted(one)}", f"{one.num_refused}"])  # fmt: skip
        panels.append(panel)
    notes = [
        *told_of(data, loads),
        "A cache alone is counted from the trace: a pool of this size that holds nothing but cache, drops what was in "
        "use longest ago, and sees one request after the other. The engine finds that, within about a point. Where it "
        "is flat, it is the trace: all that is found there is the beginning that its requests have in common (512 "
        "tokens in Mooncake's conversations), for until somebody asks on, more than the pool has passed through it.",
        "Beside this model an H100 has room for about 400,000 slots; larger pools say what more memory, or the host's "
        "(next figure), would find.",
    ]
    heads = ["trace", "device slots", "found %", "a cache alone", "endless cache", "first token p50, s", "p90", "p99",
             "gap p50, ms", "p99", "preempted", "refused"]  # fmt: skip
    title = "Recorded traffic: prefixes found, by the size of the pool"
    data_used = ", ".join([*MOONCAKE.values(), SHAREGPT])
    return Figure("figure-prefixes", title, f"{MODEL_OF_TODAY}, blocks of 64 (Mooncake) and 16", heads, rows, panels,
                  notes, data_used)  # fmt: skip


def figure_tier(data: Data, tell: Tell) -> Figure:
    """The host's memory as a second tier of the cache, against none, over a near and a far link."""
    rows, panels, loads = [], [], prefix_loads(data)
    for name, (asked, size) in loads.items():
        part = 1 if name in MOONCAKE else PART
        best, pool = best_hit_share(asked, size), DEVICE_POOL // part
        runs, keys = [], []
        for link, host in [*((NEAR, host) for host in HOSTS), (FAR, HOSTS[-1])]:
            device = replace(DEVICES[GPU], host_link=link)
            setup = served(size, pool, device, num_host_blocks=host // part // size, max_len=LONGEST)
            runs.append(Run(setup, asked))
            keys.append((link, host // part))
        panel = Panel(
            f"{name},\n{pool:,} slots on the device", "slots of the host's pool, thousand", "prompt tokens, %"
        )
        for (link, host), one in zip(keys, outcomes(data, runs, tell), strict=True):
            alone = best_hit_share(asked, size, num_blocks=(pool + host) // size)
            if link == NEAR:
                panel.add("found", host / 1000, 100 * one.hit_share)
                panel.add("of these on the host", host / 1000, 100 * one.host_hit_share)
                panel.add("a cache of both sizes alone", host / 1000, 100 * alone)
                panel.add("an endless cache", host / 1000, 100 * best)
            rows.append([name, f"{host:,}", f"{link / 1e9:g}" if host else "", f"{100 * one.hit_share:.1f}",
                         f"{100 * one.host_hit_share:.1f}", f"{100 * alone:.1f}", f"{100 * best:.1f}",
                         f"{one.first_s['mean']:.2f}", f"{one.first_s['p50']:.2f}", f"{one.first_s['p99']:.2f}",
                         f"{preempted(one)}"])  # fmt: skip
        panels.append(panel)
    heads = ["trace", "host slots", "GB/s", "found %", "on the host", "a cache alone", "endless cache",
             "first token mean, s", "p50", "p99", "preempted"]  # fmt: skip
    notes = [
        *told_of(data, loads),
        "Found is of all prompt tokens, at the first start of their request; what was on the host comes over the link "
        "before the request computes the rest. A cache alone is that of the figure before, as large as both pools.",
        "More than a cache alone: a host pool that is full takes only blocks that were shared before, so that prompts "
        "which pass once push out nothing. Less: what a device block held that is taken for one that comes back is "
        "dropped.",
        "Over 4 GB/s a token's KV comes more slowly than it is computed (128 KiB, so 24,000 tokens a second), and "
        "blocks that leave take their time as well: there the tier costs more than it finds, and is better left out.",
    ]
    return Figure("figure-tier", "A second tier of the cache against none", MODEL_OF_TODAY, heads, rows, panels, notes,
                  ", ".join([*MOONCAKE.values(), SHAREGPT]))  # fmt: skip


def figure_fair(data: Data, tell: Tell) -> Figure:
    """Order of arrival against shares, where one tenant asks for four fifths of more than there is."""
    lengths, seconds = data.lengths(SHAREGPT), 5 * MINUTE_S * data.share
    decoding = Decoding(heavy_percent=80)
    orders = {"arrival": False, "shares (--fair)": True}
    runs = [
        poisson_run(setup_of("opt-13b", decoding=decoding, is_fair=is_fair, max_rows=32), lengths, 6.0, seconds)
        for is_fair in orders.values()
    ]
    rows, panel = [], Panel("", "", "mean normalized latency, s/token", kind="groups")
    for name, (record, _) in zip(orders, run_all(runs, data.jobs, tell), strict=True):
        cells = []
        for tenant in (b"light", b"heavy"):
            some = [seen for number, seen in record.seen.items() if decoding.tenant_of(number) == tenant]
            mean = fmean((seen.last_s - seen.at_s) / seen.num_output for seen in some)
            cells += [f"{1e3 * mean:.0f}", f"{spread([seen.first_s - seen.at_s for seen in some])['p99']:.1f}"]
            panel.bar(f"the {tenant.decode()} tenant", mean)
        panel.names.append(name)
        rows.append([name, *cells, f"{record.last_end_s:.0f}"])
    heads = ["order", "the light tenant, ms/token", "first token p99, s", "the heavy one, ms/token",
             "first token p99, s", "seconds until all are answered"]  # fmt: skip
    setup = f"OPT-13B, ShareGPT lengths at 6 requests/s, 32 rows, {seconds:.0f} s; 80 % of requests are one tenant's"
    return Figure("figure-fair", "Order of arrival against shares", setup, heads, rows, [panel], [], SHAREGPT)


TRACES: dict[str, Callable[[Data, Tell], Figure]] = {
    "azure": figure_azure,
    "prefixes": figure_prefixes,
    "tier": figure_tier,
    "fair": figure_fair,
}
