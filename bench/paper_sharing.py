"""The paper's figures by simulation, second half: what sequences share. Samples, beams, and a common beginning."""

from collections.abc import Callable
from dataclasses import replace

from bench.paper_data import (
    ALPACA,
    ORCAS,
    PAIRS,
    POLICIES,
    ROW_S,
    SENTENCES,
    SHAREGPT,
    Data,
    outcomes,
    poisson_run,
    setup_of,
    slower,
    with_dear_rows,
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
WAYS_OF_STEPS = (("as in Figure 14", setup_of, 2), ("slower steps", slower, 2), ("slower, one at a time", slower, 1))
RATES_OF_BEAMS = (1.5, 3.0, 4.5, 6.0, 8.0, 10.0, 12.5, 16.0, 20.0)
RATES_OF_ROWS = {
    1: (20.0, 25.0, 30.0, 35.0, 40.0, 50.0, 60.0, 70.0),
    5: (10.0, 12.5, 15.0, 20.0, 35.0, 45.0, 55.0, 65.0),
}


def figure_14(data: Data, tell: Tell) -> Figure:
    rows, panels, seconds = [], [], 2 * MINUTE_S * data.share
    lengths = data.lengths(ALPACA)
    for (kind, width), rates in FIGURE_14.items():
        decoding = Decoding(n=width, beams=kind == "beams")
        panel = Panel(f"{kind}, {width}", "requests/s", LATENCY)
        made = {
            POLICIES[policy]: (setup_of("opt-13b", policy, decoding=decoding), lengths) for policy in ("paged", *ORCAS)
        }
        kept = swept(data, tell, panel, made, rates, seconds)
        panels.append(panel)
        best, paper = kept[POLICIES["paged"]], PAPER_14.get((kind, width))
        factors = [factor(best, kept[POLICIES[policy]]) for policy in ORCAS]
        beside = [f"{paper}", differs(best / kept[POLICIES["orca-oracle"]], paper)] if paper else ["", ""]
        rows.append([kind, str(width), f"{best:.1f}", *factors, *beside])
    heads = ["decoding", "width", f"paged, requests/s at {SUSTAINED_S} s/token"]
    heads += [f"x {POLICIES[policy]}" for policy in ORCAS] + ["paper: x Oracle", "off"]
    notes = [
        "The paper: from 1.3 x Orca (Oracle) with one sample (Figure 12) to 2.3 x with beams of width 6.",
        "A baseline reserves a piece for each sequence, its prompt included, and is charged nothing for copying beams. "
        "Candidates of beams are drawn at random (controller/simulate/quick.py), and are no language model's.",
        "Why the factor of beams of 6 is not the paper's: the next table.",
    ]
    setup = f"OPT-13B on one A100-40GB, 15.7k slots, Alpaca lengths ({told(lengths)}), {seconds:.0f} s"
    return Figure("figure-14", "Samples and beams (Figure 14)", setup, heads, rows,
                  panels, notes, ALPACA)  # fmt: skip


def figure_beams(data: Data, tell: Tell) -> Figure:
    """Beams of 6 once more, with steps as a system of 2023 may have had them: where the paper's factor comes from."""
    rows, panels, seconds = [], [], 2 * MINUTE_S * data.share
    lengths, decoding, paper = data.lengths(ALPACA), Decoding(n=6, beams=True), PAPER_14["beams", 6]
    for title, setup_for, depth in WAYS_OF_STEPS:
        panel, names = Panel(title, "requests/s", LATENCY), [POLICIES[policy] for policy in ("paged", "orca-oracle")]
        made = {
            POLICIES[policy]: (replace(setup_for("opt-13b", policy, decoding=decoding), depth=depth), lengths)
            for policy in ("paged", "orca-oracle")
        }
        kept = swept(data, tell, panel, made, RATES_OF_BEAMS, seconds)
        panels.append(panel)
        best, least = (kept[name] for name in names)
        rows.append([title, f"{best:.1f}", f"{least:.1f}", f"{best / least:.2f}", f"{paper}",
                     differs(best / least, paper)])  # fmt: skip
    heads = ["steps", "paged, requests/s", POLICIES["orca-oracle"], "factor", "paper", "off"]
    notes = [
        "Slower steps are those of Figure 13: 10 ms more for each, and prompts in steps of their own, which whoever "
        "takes many requests a second pays for more often. One at a time: in ours two steps are under way, and each "
        "has half of the beams, since a beam cannot go on before it is chosen; a system of that year had one step with "
        "all, which gives most to whoever has few.",
    ]
    setup = f"OPT-13B on one A100-40GB, 15.7k slots, Alpaca lengths ({told(lengths)}), {seconds:.0f} s"
    return Figure("figure-beams", "Beams of 6 with slower steps (to Figure 14)", setup, heads, rows, panels, notes,
                  ALPACA)  # fmt: skip


def prompts_share(rows: list[list[str]]) -> str:
    """Of a pool without sharing, what prompts' whole blocks take, by each row of samples of Figure 15."""
    told = []
    for name in dict.fromkeys(row[0] for row in rows):
        some = [(int(row[2]), row[3], row[4]) for row in rows if row[:2] == [name, "samples"]]
        shares = [
            ", ".join(f"{float(saved) * n / (n - 1):.1f}" for n, *both in some if (saved := both[column]))
            for column in (0, 1)
        ]
        told.append(f"with {name} {shares[0]} (the paper's {shares[1]})")
    return "; ".join(told)


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
        "What samples share is their prompt's whole blocks: n of them save (n - 1) / n of a prompt's share of the "
        f"pool. That share is, by the numbers above, {prompts_share(rows)} %: scatter of the few hundred requests that "
        "a run draws, of which the longest hold most of the pool.",
        "Beams share what their search "
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
    for num_examples, (num_common, rates, paper) in FIGURE_16.items():
        shared, alone = Decoding(num_common=num_common), Decoding(num_common=num_common, shares=False)
        panel = Panel(f"{num_examples}-shot, {num_common} tokens", "requests/s", LATENCY)
        made = {
            "Kilburn, prefix shared": (setup_of("llama-2-13b", decoding=shared), lengths),
            "Kilburn, nothing shared": (setup_of("llama-2-13b", decoding=alone), lengths),
            POLICIES["orca-oracle"]: (setup_of("llama-2-13b", "orca-oracle", decoding=alone), lengths),
        }
        kept = swept(data, tell, panel, made, rates, seconds)
        panels.append(panel)
        times = kept["Kilburn, prefix shared"] / kept[POLICIES["orca-oracle"]]
        rates_kept = [f"{'>= ' if kept[name] == rates[-1] else ''}{kept[name]:.1f}" for name in made]
        rows.append([f"{num_examples}", *rates_kept, f"{times:.2f}", f"{paper}", differs(times, paper)])
    heads = ["examples", "shared, requests/s", "not shared", "Orca (Oracle)", "factor", "paper", "off"]
    prompt, output = mean_lengths(lengths)
    notes = [
        f"The prefix is as long as the paper's. Behind it are the sentences of newstest2016 that were English first, "
        f"{prompt:.0f} tokens in the mean, with answers as much longer as the German references of {PAIRS} are "
        f"({output:.0f}), counted by LLaMA's vocabulary.",
        "Why the factor with one example is not the paper's: the next table.",
    ]
    setup = f"LLaMA-13B (as large as Llama-2-13B) on one A100-40GB, 15.7k slots, {seconds:.0f} s"
    return Figure("figure-16", "A shared prefix (Figure 16)", setup, heads, rows, panels, notes,
                  f"{SENTENCES}, {PAIRS}")  # fmt: skip


def figure_rows(data: Data, tell: Tell) -> Figure:
    """A shared prefix once more, where each sequence of a step costs more: where the paper's factors come from."""
    rows, panels, seconds, lengths = [], [], 4 * MINUTE_S * data.share, data.translations()
    for num_examples, (num_common, _, paper) in FIGURE_16.items():
        shared, alone = Decoding(num_common=num_common), Decoding(num_common=num_common, shares=False)
        panel = Panel(f"{num_examples}-shot, {num_common} tokens, dearer rows", "requests/s", LATENCY)
        made = {
            "Kilburn, prefix shared": (with_dear_rows(setup_of("llama-2-13b", decoding=shared)), lengths),
            POLICIES["orca-oracle"]: (with_dear_rows(setup_of("llama-2-13b", "orca-oracle", decoding=alone)), lengths),
        }
        kept = swept(data, tell, panel, made, RATES_OF_ROWS[num_examples], seconds)
        panels.append(panel)
        most, least = kept.values()
        rows.append([f"{num_examples}", f"{most:.1f}", f"{least:.1f}", f"{most / least:.2f}", f"{paper}",
                     differs(most / least, paper)])  # fmt: skip
    heads = ["examples", "shared, requests/s", "Orca (Oracle)", "factor", "paper", "off"]
    notes = [
        f"Each sequence of a step takes {1e3 * ROW_S:g} ms more, for both alike. With one example ours sustains more "
        "than the paper's factor, since the device computes and nothing else: shared, a request is about half the "
        "products. Whatever a sequence costs beside them (drawing, one after the other, on the host; attention that "
        "reads through tables), a shared prefix does not save. The paper's factors lie between those of Figure 16 "
        "and these. The number was chosen to see that, and is used for nothing else.",
    ]
    setup = f"As Figure 16, {seconds:.0f} s"
    return Figure("figure-rows", "A shared prefix with dearer rows (to Figure 16)", setup, heads, rows, panels, notes,
                  f"{SENTENCES}, {PAIRS}")  # fmt: skip


SHARING: dict[str, Callable[[Data, Tell], Figure]] = {
    "14": figure_14,
    "beams": figure_beams,
    "15": figure_15,
    "16": figure_16,
    "rows": figure_rows,
}
