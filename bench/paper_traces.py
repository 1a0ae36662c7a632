"""Recorded traffic, and what the paper left open: on one H100 with a model of today, and on the paper's own setup.

Loads are the first minutes of each trace at its own pace, or faster; a prompt that a trace says begins like another is
found in the cache if it is there. What an endless cache would have found is counted from the trace alone.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from bench.paper_data import AZURE, CLIENTS, MOONCAKE, SHAREGPT, Data, outcomes, poisson_run, served, setup_of
from bench.paper_figures import MINUTE_S, Figure, Panel, Tell
from kilburn.controller.capacity import recommended_size
from kilburn.controller.core.policy import Preemption
from kilburn.controller.simulate.demand import Decoding, best_hit_share, cut, replayed
from kilburn.controller.simulate.devices import DEVICES, Reach
from kilburn.controller.simulate.roofline import Roofline, known_shape
from kilburn.controller.simulate.servegen import draw_requests, read_clients
from kilburn.controller.simulate.sizing import Run, Setup, run_all
from kilburn.controller.simulate.traces import Asked, read_trace
from kilburn.shared.ledger import layout_for

MODEL, GPU = "llama-3.1-8b", "h100-80gb"
ON = "Llama-3.1-8B on one H100-80GB"


def replay(data: Data, name: str, speed: float, minutes: float, max_len: int = 32_768) -> list[Asked]:
    """The first minutes of a trace, as fast as that; cut to what is served."""
    seconds = minutes * MINUTE_S * data.share
    return [cut(asked, max_len) for asked in replayed(read_trace(data.path(name)), speed, seconds * speed)]


def figure_azure(data: Data, tell: Tell) -> Figure:
    """Latencies of the recorded hour's beginning, and of ServeGen's clients, whose requests come in bursts."""
    runs, keys = [], []
    for name, file in AZURE.items():
        for speed in (1.0, 2.0, 4.0):
            keys.append((name, f"{speed:g} x its pace"))
            runs.append(Run(served(MODEL, GPU), replay(data, file, speed, 15)))
    for name, folder in CLIENTS.items():
        for rate in (2.0, 6.0):
            clients = read_clients(data.path(folder))
            asked = draw_requests(clients, 15 * MINUTE_S * data.share, rate, seed=1)
            keys.append((name, f"{rate:g} requests/s"))
            runs.append(Run(served(MODEL, GPU), [cut(one, 32_768) for one in asked]))
    rows = []
    for (name, pace), one in zip(keys, outcomes(data, runs, tell), strict=True):
        rows.append([name, pace, f"{one.num_requests}", f"{one.first_s['p50']:.3f}", f"{one.first_s['p99']:.2f}",
                     f"{1e3 * one.gap_s['p50']:.1f}", f"{1e3 * one.gap_s['p99']:.1f}",
                     f"{1e3 * one.normalized_s['mean']:.0f}", f"{one.mean_rows:.1f}",
                     f"{one.preempted_swap + one.preempted_recompute}", f"{100 * one.tail_waste:.1f}"])  # fmt: skip
    heads = ["trace", "pace", "requests", "first token p50, s", "p99", "gap p50, ms", "p99", "ms/token", "rows",
             "preempted", "tail waste %"]  # fmt: skip
    panel = Panel("", "", "p99 to the first token, s", kind="bars", names=[f"{n}\n{p}" for n, p in keys])
    panel.lines["p99"] = ([], [float(row[4]) for row in rows])
    setup = f"{ON}, blocks of 16; the first {15 * MINUTE_S * data.share:.0f} s of each"
    return Figure("figure-azure", "Recorded traffic: latencies", setup, heads, rows, [panel], [],
                  ", ".join([*AZURE.values(), *CLIENTS]))  # fmt: skip


def figure_mooncake(data: Data, tell: Tell) -> Figure:
    """Prefixes found, against the size of the pool and of a second tier in the host's memory."""
    rows, panels, notes = [], [], []
    for name, file in MOONCAKE.items():
        asked = replay(data, file, 0.25, 40, max_len=131_072)
        best = best_hit_share(asked, 64)
        pools = (100_000, 200_000, 400_000)
        hosts = (0, 400_000, 1_600_000)
        runs = [
            Run(served(MODEL, GPU, 64, tokens, num_host_blocks=host // 64, max_len=98_304), asked)
            for tokens in pools
            for host in hosts
        ]
        found = outcomes(data, runs, tell)
        panel = Panel(name, "slots of the device's pool", "of the prompt tokens found, %")
        for i, tokens in enumerate(pools):
            some = found[i * len(hosts) : (i + 1) * len(hosts)]
            for host, one in zip(hosts, some, strict=True):
                line = panel.lines.setdefault(f"host pool {host:,}", ([], []))
                line[0].append(tokens)
                line[1].append(100 * one.hit_share)
            rows.append([name, f"{tokens:,}", *(f"{100 * one.hit_share:.1f}" for one in some), f"{100 * best:.1f}",
                         *(f"{one.first_s['p50']:.2f}" for one in some)])  # fmt: skip
        panel.lines["an endless cache"] = ([float(t) for t in pools], [100 * best] * len(pools))
        panels.append(panel)
        notes.append(f"{name}: {len(asked)} requests of {fmean(a.num_prompt for a in asked):,.0f} prompt tokens.")
    notes.append("At a quarter of the trace's pace, which is that of a cluster. Prompts beyond 98,304 tokens are cut.")
    heads = ["trace", "device slots", "hit %", "with 400k on the host", "with 1.6M", "endless cache"]
    heads += ["first token p50, s", "with 400k", "with 1.6M"]
    title = "Recorded traffic: prefixes found, and a second tier"
    data_used = ", ".join(MOONCAKE.values())
    return Figure("figure-mooncake", title, f"{ON}, blocks of 64", heads, rows, panels, notes, data_used)


def figure_blocks(data: Data, tell: Tell) -> Figure:
    """Every block size for every kind of load, and the one that `kilburn tune block-size` would name."""
    sizes = (1, 4, 8, 16, 32, 64, 128, 256)
    loads: dict[str, list[Asked]] = {name: replay(data, file, 2.0, 6) for name, file in AZURE.items()}
    file = next(iter(MOONCAKE.values()))
    loads["Mooncake conversation"] = replay(data, file, 0.25, 15, max_len=98_304)
    panel, rows = Panel("", "block size", "mean normalized latency, over the best", kind="log x"), []
    for name, asked in loads.items():
        runs = [Run(served(MODEL, GPU, size, 150_000, max_len=98_304), asked) for size in sizes]
        found = outcomes(data, runs, tell)
        best = min(one.normalized_s["mean"] for one in found)
        panel.lines[name] = ([float(size) for size in sizes], [one.normalized_s["mean"] / best for one in found])
        chosen = recommended_size(dict(zip(sizes, found, strict=True)), within_percent=2.0)
        rows.append([name, *(f"{1e3 * one.normalized_s['mean']:.1f}" for one in found), str(chosen)])
    heads = ["load", *(f"{size}: ms/token" for size in sizes), "recommended"]
    notes = [
        "The largest block within 2 % of the best. What small blocks cost a device's kernels is not in the roofline; a "
        "report of bench/gpu_check.py brings it in (`--measured`)."
    ]
    return Figure("figure-blocks", "Block size by workload", f"{ON}, 150k slots", heads, rows, [panel], notes,
                  ", ".join([*AZURE.values(), file]))  # fmt: skip


def linked(setup: Setup, host_link: float) -> Setup:
    """The paper's OPT-13B setup with another link to the host."""
    device = replace(DEVICES["a100-40gb"], host_link=host_link)
    shape = known_shape("opt-13b", "float16", 1)
    if shape is None:
        raise SystemExit("opt-13b is not in the table")
    layout = layout_for(shape, setup.layout.block_size, "float16")
    machine = Roofline(device, Reach(), shape, layout, "float16", 1)
    return replace(setup, machine=machine, num_host_blocks=setup.num_blocks)


def figure_links(data: Data, tell: Tell) -> Figure:
    """Swap, recompute, and whichever is predicted to cost less, where the host is near and where it is far."""
    lengths, seconds = data.lengths(SHAREGPT), 8 * MINUTE_S * data.share
    links, ways = (2e9, 8e9, 32e9, 200e9), (Preemption.RECOMPUTE, Preemption.SWAP, Preemption.AUTO)
    runs = [
        poisson_run(linked(setup_of("opt-13b", preemption=way), link), lengths, 5.0, seconds)
        for link in links
        for way in ways
    ]
    found, rows = outcomes(data, runs, tell), []
    panel = Panel("", "GB/s to the host", "mean normalized latency, s/token", kind="log x")
    for i, link in enumerate(links):
        some = found[i * len(ways) : (i + 1) * len(ways)]
        for way, one in zip(ways, some, strict=True):
            line = panel.lines.setdefault(way.value, ([], []))
            line[0].append(link / 1e9)
            line[1].append(one.normalized_s["mean"])
        rows.append([f"{link / 1e9:g}", *(f"{1e3 * one.normalized_s['mean']:.1f}" for one in some),
                     f"{some[2].preempted_swap} / {some[2].preempted_recompute}"])  # fmt: skip
    heads = ["GB/s", "recompute, ms/token", "swap", "auto", "auto: swap / recompute"]
    setup = f"OPT-13B at 5 requests/s, blocks of 16, a host pool as large as the device's, {seconds:.0f} s"
    return Figure("figure-links", "Adaptive preemption against fixed ways", setup, heads, rows, [panel], [], SHAREGPT)


def figure_fair(data: Data, tell: Tell) -> Figure:
    """Order of arrival against shares, where one tenant asks for four fifths of more than there is."""
    lengths, seconds = data.lengths(SHAREGPT), 8 * MINUTE_S * data.share
    decoding = Decoding(heavy_percent=80)
    orders = {"arrival": False, "shares (--fair)": True}
    runs = [
        poisson_run(setup_of("opt-13b", decoding=decoding, is_fair=is_fair, max_rows=32), lengths, 6.0, seconds)
        for is_fair in orders.values()
    ]
    rows, panel = [], Panel("", "", "mean normalized latency, s/token", kind="bars")
    for name, (record, _) in zip(orders, run_all(runs, data.jobs, tell), strict=True):
        means = {}
        for tenant in (b"light", b"heavy"):
            some = [seen for number, seen in record.seen.items() if decoding.tenant_of(number) == tenant]
            means[tenant] = fmean((seen.last_s - seen.at_s) / seen.num_output for seen in some)
            panel.names.append(f"{name},\n{tenant.decode()}")
            panel.lines.setdefault("mean", ([], []))[1].append(means[tenant])
        rows.append([name, f"{1e3 * means[b'light']:.0f}", f"{1e3 * means[b'heavy']:.0f}", f"{record.last_end_s:.0f}"])
    heads = ["order", "the light tenant, ms/token", "the heavy one", "seconds until all are answered"]
    setup = f"OPT-13B at 6 requests/s, 32 rows, {seconds:.0f} s; 80 % of the requests are one tenant's"
    return Figure("figure-fair", "Order of arrival against shares", setup, heads, rows, [panel], [], SHAREGPT)


TRACES: dict[str, Callable[[Data, Tell], Figure]] = {
    "azure": figure_azure,
    "mooncake": figure_mooncake,
    "blocks": figure_blocks,
    "links": figure_links,
    "fair": figure_fair,
}
