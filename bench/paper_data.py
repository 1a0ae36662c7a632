"""The data of the evidence, found by name in one folder, and the setups of the paper's Table 1.

No file is in this repository. A figure whose files are not in the folder is left out, and says which it wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kilburn.controller.simulate.demand import PLAIN, Decoding, cut, poisson
from kilburn.controller.simulate.devices import DEVICES, Reach
from kilburn.controller.simulate.outcome import Outcome, outcome_of
from kilburn.controller.simulate.roofline import Roofline, known_shape
from kilburn.controller.simulate.sizing import Run, Setup, Watch, run_all
from kilburn.controller.simulate.traces import CHARACTERS_PER_TOKEN, Asked, TraceError, read_json, read_trace
from kilburn.shared.ledger import layout_for

SHAREGPT = "sharegpt_sample.jsonl.gz"
ALPACA = "alpaca_5000.json.gz"
PAIRS = "newstest2016-ende-subset.tsv"
AZURE = {
    "Azure conversation": "AzureLLMInferenceTrace_conv.csv.gz",
    "Azure code": "AzureLLMInferenceTrace_code.csv.gz",
}
MOONCAKE = {
    "Mooncake conversation": "conversation_trace.first4000.jsonl.gz",
    "Mooncake synthetic": "synthetic_trace.jsonl.gz",
}
CLIENTS = {"ServeGen m-small": "m-small", "ServeGen deepseek-r1": "deepseek-r1"}
POLICIES = {
    "paged": "Kilburn, paged",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "batch": "FasterTransformer-like",
}


@dataclass(frozen=True, slots=True)
class Data:
    """The folder, and how much time there is. `share` shortens every simulated run."""

    folder: Path
    jobs: int = 1
    share: float = 1.0

    def path(self, name: str) -> Path:
        """Raises TraceError."""
        found = sorted(self.folder.rglob(name))
        if not found:
            raise TraceError(f"{self.folder}: holds no {name} at any depth")
        return found[0]

    def lengths(self, name: str, max_len: int = 2048) -> list[Asked]:
        """Each request of a file, without its text and cut to the model."""
        return [replace(cut(asked, max_len), text="") for asked in read_trace(self.path(name))]

    def chats(self, most: int = 1024) -> list[Asked]:
        """One request for each answer of a conversation: all before it, of which the last tokens, and the answer."""
        found = []
        for _, entry in read_json(self.path(SHAREGPT)):
            before = 0
            for turn in entry["conversations"]:
                tokens = max(len(turn["value"]) // CHARACTERS_PER_TOKEN, 1)
                if turn["from"] == "gpt" and before:
                    found.append(Asked(None, min(before, most), min(tokens, most)))
                before += tokens
        return found

    def translations(self, num_examples: int) -> tuple[int, list[Asked]]:
        """Tokens of the shared beginning (a task and examples), and (sentence, translation) of each request."""
        lines = self.path(PAIRS).read_text(encoding="utf-8").splitlines()
        rows = [row for line in lines if len(row := line.split("\t")) >= 6]
        size = [(len(row[2]) // CHARACTERS_PER_TOKEN + 8, len(row[5]) // CHARACTERS_PER_TOKEN + 1) for row in rows]
        # 80 and 341 tokens in the paper, with 1 and 5 examples of its own; the prefix here is as long as the paper's.
        return {1: 80, 5: 341}[num_examples], [Asked(None, prompt, output) for prompt, output in size]


# --- Table 1 of the paper

TABLE_1 = {  # model: (device, ranks, slots of KV)
    "opt-13b": ("a100-40gb", 1, 15_700),
    "opt-66b": ("a100-40gb", 4, 9_700),
    "opt-175b": ("a100-80gb", 8, 60_100),
    "llama-2-13b": ("a100-40gb", 1, 15_700),  # as large as LLaMA-13B, of which the paper's section 6.4 speaks
}


def setup_of(
    model: str,
    policy: str = "paged",
    block_size: int = 16,
    decoding: Decoding = PLAIN,
    **changed: Any,
) -> Setup:
    """A row of Table 1. `changed`: fields of Setup."""
    device, ranks, num_slots = TABLE_1[model]
    shape = known_shape(model, "float16", ranks)
    if shape is None:
        raise SystemExit(f"{model} is not split by {ranks}")
    layout = layout_for(shape, block_size, "float16")
    machine = Roofline(DEVICES[device], Reach(), shape, layout, "float16", ranks)
    made = Setup(
        layout,
        machine,
        num_slots // block_size,
        max_rows=256,
        max_step_tokens=2560,
        max_len=2048,
        policy=policy,
        decoding=decoding,
    )
    return replace(made, **changed)


def served(model: str, device: str, block_size: int = 16, num_slots: int = 400_000, **changed: Any) -> Setup:
    """A model of today on one device, as `kilburn serve` would run it. `changed`: fields of Setup."""
    shape = known_shape(model, "bfloat16", 1)
    if shape is None:
        raise SystemExit(f"{model} is not in the table of models")
    layout = layout_for(shape, block_size, "bfloat16")
    machine = Roofline(DEVICES[device], Reach(), shape, layout, "bfloat16", 1)
    made = Setup(layout, machine, num_slots // block_size, max_rows=256, max_step_tokens=8192, max_len=32_768)
    return replace(made, **changed)


def outcomes(data: Data, runs: Sequence[Run], tell: Any) -> list[Outcome]:
    return [outcome_of(record, tally) for record, tally in run_all(runs, data.jobs, tell)]


def poisson_run(setup: Setup, lengths: Sequence[Asked], rate: float, seconds: float, is_cut: bool = False) -> Run:
    """`is_cut`: it ends with the last arrival, and what is looked at begins after a fifth of it."""
    watch = Watch(1.0, seconds / 5, seconds) if is_cut else Watch(max(seconds / 100, 1.0))
    return Run(setup, poisson(lengths, rate, seconds, seed=1), watch=watch)


def sustained(rates: Sequence[float], latencies_s: Sequence[float], most_s: float) -> float:
    """The rate at which latency reaches a bound, by straight lines between rates; the last where it never does."""
    before = (0.0, 0.0)
    for rate, latency_s in zip(rates, latencies_s, strict=True):
        if latency_s > most_s:
            (rate_0, latency_0), rise = before, latency_s - before[1]
            return rate_0 + (rate - rate_0) * (most_s - latency_0) / rise
        before = (rate, latency_s)
    return rates[-1]
