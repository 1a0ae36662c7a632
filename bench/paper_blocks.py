"""Blocks: their size (the paper's Figure 18, and by workload), and what leaves when they run out (Figure 19, links)."""

from collections.abc import Callable
from dataclasses import replace

from bench.paper_data import (
    ALPACA,
    AZURE,
    MODEL_OF_TODAY,
    MOONCAKE,
    REACH,
    SHAREGPT,
    Data,
    outcomes,
    poisson_run,
    replay,
    served,
    setup_of,
)
from bench.paper_kernel import CONTEXT, NUM_SEQS, attention_by_block
from bench.paper_lengths import mean_lengths
from bench.paper_shape import BLOCK_SIZES, LATENCY, MINUTE_S, Figure, Panel, Tell, short
from kilburn.controller.capacity import recommended_size
from kilburn.controller.core.policy import Preemption
from kilburn.controller.simulate.devices import DEVICES, Reach
from kilburn.controller.simulate.roofline import Load
from kilburn.controller.simulate.sizing import Run

WAYS = (Preemption.RECOMPUTE, Preemption.SWAP, Preemption.AUTO)
LOADS_18 = ((SHAREGPT, 3.0, 10), (ALPACA, 40.0, 2))  # (lengths, requests a second, minutes)
RATE_19 = 4.0


def near_best(rows: list[list[str]], column: int, name: str) -> str:
    """The sizes whose number in a column is within a tenth of the least, in words."""
    numbers = {row[0]: float(row[column]) for row in rows}
    near = [size for size, number in numbers.items() if number <= 1.1 * min(numbers.values())]
    return f"with {name}, {', '.join(near)}"


def figure_18(data: Data, tell: Tell) -> Figure:
    kernel = Panel("decode attention on this CPU", "block size", "times a plain read", kind="log x")
    costs = attention_by_block(BLOCK_SIZES, rounds=max(int(15 * data.share), 3))
    for size, cost in costs.items():
        kernel.add("attention", size, cost)
    best = min(costs.values())
    as_here = replace(REACH, by_block_size={size: REACH.bandwidth * best / cost for size, cost in costs.items()})
    panels, found = [kernel], []
    for name, rate, minutes in LOADS_18:
        panel = Panel(f"{short(name)}, {rate:g} requests/s", "block size", LATENCY, kind="log x")
        for line, reach in (("all sizes read alike", REACH), ("read as on this CPU", as_here)):
            runs = [
                poisson_run(setup_of("opt-13b", block_size=size, reach=reach), data.lengths(name), rate,
                            minutes * MINUTE_S * data.share)
                for size in BLOCK_SIZES
            ]  # fmt: skip
            some = outcomes(data, runs, tell)
            found.append(some)
            for size, one in zip(BLOCK_SIZES, some, strict=True):
                panel.add(line, size, one.normalized_s["mean"])
        panels.append(panel)
    rows = []
    for i, size in enumerate(BLOCK_SIZES):
        latencies = [f"{1e3 * some[i].normalized_s['mean']:.1f}" for some in found]
        wastes = [f"{100 * some[i].tail_waste:.1f}" for some in found[::2]]
        rows.append([f"{size}", f"{costs[size]:.2f}", *latencies[:2], wastes[0], *latencies[2:], wastes[1]])
    each = ["ms/token", "read as here", "waste %"]
    heads = ["block size", "attention / read", *(f"{short(n)}: {w}" for n, _, _ in LOADS_18 for w in each)]
    lines = [(3 * i + j, f"{short(LOADS_18[i][0])}{way}") for i in (0, 1) for j, way in ((0, ""), (1, " read as here"))]
    notes = [
        "The paper: 16 to 128 are best with ShareGPT, 16 and 32 with Alpaca; small blocks are read worse by its "
        "kernel, large ones waste memory and share less. A block of ours is contiguous whatever its size, and the "
        "roofline has no price for small ones: the first line is what the pool alone does. The second takes from the "
        "device's bandwidth what this CPU's kernel loses at each size (first panel). What a GPU's loses is "
        "`block_sizes` of bench/gpu_check.py, which `kilburn simulate --measured` takes into account.",
        "Within a tenth of the best are here, " + "; ".join(near_best(rows, 2 + i, name) for i, name in lines) + ".",
    ]
    setup = f"OPT-13B, 15.7k slots, paged; attention of {NUM_SEQS} sequences of {CONTEXT:,} tokens on this CPU"
    return Figure("figure-18", "Block size (Figure 18)", setup, heads, rows, panels, notes, f"{SHAREGPT}, {ALPACA}")


def one_preemption(size: int, num_tokens: int) -> tuple[float, float]:
    """Seconds to swap a sequence out and in again, and to compute it anew, by the roofline."""
    setup = setup_of("opt-13b", block_size=size)
    moves_s, _ = setup.machine.seconds(Load(num_moved=2 * -(-num_tokens // size)))
    again = Load(num_chunks=1, num_chunk_tokens=num_tokens, num_pairs=num_tokens * (num_tokens + 1) // 2, num_sampled=1)
    return moves_s, setup.machine.seconds(again)[1]


def figure_19(data: Data, tell: Tell) -> Figure:
    lengths, seconds = data.lengths(SHAREGPT), 5 * MINUTE_S * data.share
    num_tokens = round(sum(mean_lengths(lengths)))
    alone = Panel(f"one sequence of {num_tokens} tokens", "block size", "ms", kind="log x")
    whole = Panel(f"ShareGPT, {RATE_19:g} requests/s", "block size", LATENCY, kind="log x")
    runs = []
    for way in WAYS:
        for size in BLOCK_SIZES:
            setup = setup_of("opt-13b", block_size=size, preemption=way)
            runs.append(poisson_run(replace(setup, num_host_blocks=setup.num_blocks), lengths, RATE_19, seconds))
    found, rows = outcomes(data, runs, tell), []
    for i, size in enumerate(BLOCK_SIZES):
        some = [found[number * len(BLOCK_SIZES) + i] for number in range(len(WAYS))]
        swap_s, again_s = one_preemption(size, num_tokens)
        alone.add("recompute", size, 1e3 * again_s)
        alone.add("swap, out and in", size, 1e3 * swap_s)
        for way, one in zip(WAYS, some, strict=True):
            whole.add(way.value, size, one.normalized_s["mean"])
        rows.append([f"{size}", f"{1e3 * swap_s:.1f}", f"{1e3 * again_s:.1f}",
                     *(f"{1e3 * one.normalized_s['mean']:.1f}" for one in some),
                     f"{some[0].preempted_recompute}", f"{some[1].preempted_swap}",
                     f"{some[2].preempted_swap} / {some[2].preempted_recompute}"])  # fmt: skip
    heads = ["block size", "swapping one, ms", "recomputing it", "recompute, ms/token", "swap", "auto"]
    heads += ["preempted by recompute", "by swap", "auto: swap / recompute"]
    notes = [
        "The paper: swapping small blocks is slow, since each is many small copies (one a layer, for K and for V); "
        "recomputing does not depend on the block; from 16 to 64 both come to the same. A block of ours is one copy, "
        f"whatever its size, charged with {1e6 * REACH.move_s:g} us beside its bytes: swapping suffers only at the "
        "smallest sizes. Large blocks cost by the memory that they waste, in whatever way others leave.",
        "Swapping one takes half of recomputing it, and whole runs differ by less: a request is preempted about once, "
        "for some tens of ms, and waits for memory for many seconds.",
    ]
    setup = f"OPT-13B, 15.7k slots, a host pool as large as the device's, PCIe 4 at 80 %, {seconds:.0f} s"
    return Figure("figure-19", "Recompute against swap (Figure 19)", setup, heads, rows, [alone, whole], notes,
                  SHAREGPT)  # fmt: skip


def figure_blocks(data: Data, tell: Tell) -> Figure:
    """Every block size for every kind of load, and the one that `kilburn tune block-size` would name."""
    loads = {name: (replay(data, file, 4.0, 5, max_len=8192), 40_000, 8192) for name, file in AZURE.items()}
    for name, file in MOONCAKE.items():
        loads[name] = (replay(data, file, 0.25, 12, max_len=98_304), 100_000, 98_304)
    panel, rows = Panel("", "block size", "mean normalized latency, % over the best", kind="log x"), []
    for name, (asked, num_slots, max_len) in loads.items():
        runs = [Run(served(size, num_slots, max_len=max_len), asked) for size in BLOCK_SIZES]
        found = outcomes(data, runs, tell)
        best = min(one.normalized_s["mean"] for one in found)
        for size, one in zip(BLOCK_SIZES, found, strict=True):
            panel.add(name, size, 100 * (one.normalized_s["mean"] / best - 1))
        chosen = recommended_size(dict(zip(BLOCK_SIZES, found, strict=True)), within_percent=2.0)
        rows.append([name, *(f"{1e3 * one.normalized_s['mean']:.1f}" for one in found), f"{chosen}"])
    heads = ["load", *(f"{size}: ms/token" for size in BLOCK_SIZES), "recommended"]
    notes = [
        "Recommended is what `kilburn tune block-size` names: the largest block within 2 % of the best. What small "
        "blocks cost a device's kernels is not in the roofline; a report of bench/gpu_check.py brings it in "
        "(`--measured`).",
    ]
    setup = (
        f"{MODEL_OF_TODAY}, pools that are short: Azure at 4 x its pace with 40k slots, Mooncake at a quarter with 100k"
    )
    return Figure("figure-blocks", "Block size by workload", setup, heads, rows, [panel], notes,
                  ", ".join([*AZURE.values(), *MOONCAKE.values()]))  # fmt: skip


def figure_links(data: Data, tell: Tell) -> Figure:
    """Swap, recompute, and whichever is predicted to cost less, where the host is near and where it is far."""
    lengths, seconds = data.lengths(SHAREGPT), 5 * MINUTE_S * data.share
    links, runs = (1e9, 4e9, 16e9, 64e9, 256e9), []
    for link in links:
        for way in WAYS:
            setup = setup_of("opt-13b", preemption=way, device=replace(DEVICES["a100-40gb"], host_link=link))
            runs.append(poisson_run(replace(setup, num_host_blocks=setup.num_blocks), lengths, RATE_19, seconds))
    found, rows = outcomes(data, runs, tell), []
    panel = Panel("", "GB/s to the host", LATENCY, kind="log x")
    for i, link in enumerate(links):
        some = found[i * len(WAYS) : (i + 1) * len(WAYS)]
        for way, one in zip(WAYS, some, strict=True):
            panel.add(way.value, link / 1e9, one.normalized_s["mean"])
        best = min(one.normalized_s["mean"] for one in some[:2])
        rows.append([f"{link / 1e9:g}", *(f"{1e3 * one.normalized_s['mean']:.1f}" for one in some),
                     f"{some[2].normalized_s['mean'] / best:.2f}", f"{some[0].preempted_recompute}",
                     f"{some[1].preempted_swap}",
                     f"{some[2].preempted_swap} / {some[2].preempted_recompute}"])  # fmt: skip
    heads = ["GB/s", "recompute, ms/token", "swap", "auto", "auto of the better", "preempted by recompute", "by swap"]
    heads.append("auto: swap / recompute")
    setup = f"OPT-13B, ShareGPT lengths at {RATE_19:g} requests/s, blocks of 16, a host pool as large as the device's, "
    setup += f"{100 * Reach().host_link:.0f} % of the link reached, {seconds:.0f} s"
    return Figure("figure-links", "Adaptive preemption against fixed ways", setup, heads, rows, [panel], [], SHAREGPT)


BLOCKS: dict[str, Callable[[Data, Tell], Figure]] = {
    "18": figure_18,
    "19": figure_19,
    "blocks": figure_blocks,
    "links": figure_links,
}
