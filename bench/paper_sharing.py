"""The paper's figures by simulation, second half: what sequences share. Samples, beams, and a common beginning."""

from collections.abc import Callable

from bench.paper_data import (
    ALPACA,
    ORCAS,
    PAIRS,
    POLICIES,
    SENTENCES,
    SHAREGPT,
    Data,
    outcomes,
    poisson_run,
    setup_of,
    slower,
)
from bench.paper_lengths import mean_lengths, told
from bench.paper_shape import LATENCY, MINUTE_S, SUSTAINED_S, Figure, Panel, Tell, differs, factor, short, swept
from kilburn.controller.simulate.demand import Decoding

FIGURE_14 = {
    ("samples", 2): (4.0, 8.0, 12.0, 16.0, 20.0, 25.0, 30.0, 40.0, 50.0, 65.0),
    ("samples", 4): (2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 16.0, 20.0, 26.0, 33.0),
    ("samples", 6): (1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 10.0, 13.0, 17.0, 22.0),
    ("beams", 2): (3.0, 6.0, 9.0, 12.0, 16.0, 20.0, 25.0, 30.0, 40.0, 55.0),
    ("beams", 4): (1.5, 3.0, 5.0, 7.0, 9.0, 12.0, 15.0, 18.0, 23.0, 30.0),
    ("beams", 6): (1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0),
}
PAPER_14 = {("beams", 6): 2.3}  # paged over Orca (Oracle)
PAPER_15 = {
    (ALPACA, "samples"): {2: 6.09, 4: 8.53, 6: 9.79},
    (ALPACA, "beams"): {2: 37.56, 4: 53.13, 6: 55.16},
    (SHAREGPT, "samples"): {2: 16.2, 6: 30.5},
    (SHAREGPT, "beams"): {2: 44.3, 6: 66.3},
}
SURE_SHARE = 0.85  # a guess at a language model, for the variant of Figure 15
FIGURE_16 = {  # examples: (tokens of the prefix, rates, the paper's factor)
    1: (80, (5.0, 10.0, 20.0, 30.0, 35.0, 40.0, 50.0, 60.0, 70.0, 80.0, 100.0, 120.0), 1.67),
    5: (341, (2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0), 3.58),
}
STEPS = (("", setup_of), (", slower steps", slower))  # the second where the paper has a number


def figure_14(data: Data, tell: Tell) -> Figure:
    rows, panels, seconds = [], [], 2 * MINUTE_S * data.share
    lengths = data.lengths(ALPACA)
    every = [(*key, *way) for key in FIGURE_14 for way in (STEPS if key in PAPER_14 else STEPS[:1])]
    for kind, width, steps, setup_for in every:
        decoding, paper = Decoding(n=width, beams=kind == "beams"), PAPER_14.get((kind, width))
        panel = Panel(f"{kind}, {width}{steps}", "requests/s", LATENCY)
        made = {
            POLICIES[policy]: (setup_for("opt-13b", policy, decoding=decoding), lengths) for policy in ("paged", *ORCAS)
        }
        kept = swept(data, tell, panel, made, FIGURE_14[kind, width], seconds)
        panels.append(panel)
        best = kept[POLICIES["paged"]]
        factors = [factor(best, kept[POLICIES[policy]]) for policy in ORCAS]
        beside = [f"{paper}", differs(best / kept[POLICIES["orca-oracle"]], paper)] if paper else ["", ""]
        rows.append([f"{kind}{steps}", str(width), f"{best:.1f}", *factors, *beside])
    heads = ["decoding", "width", f"paged, requests/s at {SUSTAINED_S} s/token"]
    heads += [f"x {POLICIES[policy]}" for policy in ORCAS] + ["paper: x Oracle", "off"]
    notes = [
        "The paper: from 1.3 x Orca (Oracle) with one sample (Figure 12) to 2.3 x with beams of width 6.",
        "A baseline reserves a piece for each sequence, its prompt included, and is charged nothing for copying beams. "
        "Candidates of beams are drawn at random (controller/simulate/quick.py), and are no language model's.",
    ]
    setup = f"OPT-13B on one A100-40GB, 15.7k slots, Alpaca lengths ({told(lengths)}), {seconds:.0f} s"
    return Figure("figure-14", "Samples and beams (Figure 14)", setup, heads, rows,
                  panels, notes, ALPACA)  # fmt: skip


def figure_15(data: Data, tell: Tell) -> Figure:
    runs, keys = [], []
    for (name, kind), widths in PAPER_15.items():
        lengths, rate = data.lengths(name), 16.0 if name == ALPACA else 2.0
        seconds = (3 if name == ALPACA else 12) * MINUTE_S * data.share
        for width in (2, 4, 6):
            for sure_share in (0.0, SURE_SHARE) if kind == "beams" else (0.0,):
                decoding = Decoding(n=width, beams=kind == "beams", sure_share=sure_share)
                runs.append(poisson_run(setup_of("opt-13b", decoding=decoding), lengths, rate / width, seconds, True))
                keys.append((name, kind, width, sure_share, widths.get(width)))
    rows, panels = [], {name: Panel(short(name), "sequences of a request", "blocks saved, %") for name, _ in PAPER_15}
    for (name, kind, width, sure_share, paper), outcome in zip(keys, outcomes(data, runs, tell), strict=True):
        saved = 100 * outcome.saved_share
        line = f"{kind}, {100 * sure_share:.0f} % sure" if sure_share else kind
        panels[name].add(line, width, saved)
        if paper and not sure_share:
            panels[name].add(f"paper: {kind}", width, paper)
        shown = (f"{paper:.1f}", differs(saved, paper)) if paper else ("", "")
        rows.append([short(name), line, str(width), f"{saved:.1f}", *shown])
    notes = [
        "Of the blocks that would be needed without sharing, those that sharing saves, over samples of the running "
        "pool. For ShareGPT the paper gives the ends of a range, which stand here at widths 2 and 6.",
        "What samples share is their prompt's whole blocks: it follows from lengths. Beams share what their search "
        "makes them share, and that depends on the model. Here candidates are drawn at random, so that beams die and "
        "branch more often than a language model's, for which most tokens are all but certain, and share more. "
        f"`{100 * SURE_SHARE:.0f} % sure` has one such candidate at that share of positions, and shares less: from "
        "which we take it that the rest of the difference is the model's. bench/sharing.py measures one.",
    ]
    heads = ["requests", "decoding", "width", "saved %", "paper %", "off"]
    return Figure("figure-15", "Memory saved by sharing (Figure 15)", "OPT-13B, 15.7k slots", heads, rows,
                  list(panels.values()), notes, f"{SHAREGPT}, {ALPACA}")  # fmt: skip


def figure_16(data: Data, tell: Tell) -> Figure:
    rows, panels, seconds = [], [], 4 * MINUTE_S * data.share
    lengths = data.translations()
    every = [(examples, steps, setup_for) for examples in FIGURE_16 for steps, setup_for in STEPS]
    for num_examples, steps, setup_for in every:
        num_common, rates, paper = FIGURE_16[num_examples]
        shared, alone = Decoding(num_common=num_common), Decoding(num_common=num_common, shares=False)
        panel = Panel(f"{num_examples}-shot, {num_common} tokens{steps}", "requests/s", LATENCY)
        made = {
            "Kilburn, prefix shared": (setup_for("llama-2-13b", decoding=shared), lengths),
            "Kilburn, nothing shared": (setup_for("llama-2-13b", decoding=alone), lengths),
            POLICIES["orca-oracle"]: (setup_for("llama-2-13b", "orca-oracle", decoding=alone), lengths),
        }
        kept = swept(data, tell, panel, made, rates, seconds)
        panels.append(panel)
        times = kept["Kilburn, prefix shared"] / kept[POLICIES["orca-oracle"]]
        rates_kept = [f"{'>= ' if kept[name] == rates[-1] else ''}{kept[name]:.1f}" for name in made]
        rows.append([f"{num_examples}{steps}", *rates_kept, f"{times:.2f}", f"{paper}", differs(times, paper)])
    heads = ["examples", "shared, requests/s", "not shared", "Orca (Oracle)", "factor", "paper", "off"]
    prompt, output = mean_lengths(lengths)
    notes = [
        f"The prefix is as long as the paper's. Behind it are the sentences of newstest2016 that were English first, "
        f"{prompt:.0f} tokens in the mean, with answers as much longer as the German references of {PAIRS} are "
        f"({output:.0f}), counted by LLaMA's vocabulary.",
    ]
    setup = f"LLaMA-13B (as large as Llama-2-13B) on one A100-40GB, 15.7k slots, {seconds:.0f} s"
    return Figure("figure-16", "A shared prefix (Figure 16)", setup, heads, rows, panels, notes,
                  f"{SENTENCES}, {PAIRS}")  # fmt: skip


SHARING: dict[str, Callable[[Data, Tell], Figure]] = {"14": figure_14, "15": figure_15, "16": figure_16}
