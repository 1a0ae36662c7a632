"""The data of the evidence, found by name in one folder, and the setups of the paper's Table 1.

No file is in this repository. A figure whose files are not in the folder is left out, and says which it wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.paper_lengths import (
    LLAMA,
    OPT,
    by_characters,
    chats,
    conversations,
    counter,
    first_turns,
    instructions,
    sessions,
    translations,
)
from kilburn.controller.simulate.demand import PLAIN, Decoding, cut, poisson, replayed
from kilburn.controller.simulate.devices import DEVICES, Device, Reach
from kilburn.controller.simulate.outcome import Outcome, outcome_of
from kilburn.controller.simulate.roofline import Load, Machine, Roofline, known_shape
from kilburn.controller.simulate.sizing import Run, Setup, Watch, run_all
from kilburn.controller.simulate.traces import Asked, TraceError, read_trace
from kilburn.shared.ledger import layout_for

SHAREGPT = "sharegpt_sample.jsonl.gz"
ALPACA = "alpaca_5000.json.gz"
SENTENCES, PAIRS = "newstest2016-en-origin.en", "newstest2016-ende-subset.tsv"
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
ORCAS = ("orca-oracle", "orca-pow2", "orca-max")


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
        """The first question and answer of each conversation, or each instruction; cut to the model. TraceError."""
        return [cut(asked, max_len) for asked in _counted(name, self.path(name), self.path(OPT))]

    def guessed(self, name: str, max_len: int = 2048) -> list[Asked]:
        """The same by characters: what a trace without a tokenizer would say. Raises TraceError."""
        return [cut(asked, max_len) for asked in _counted(name, self.path(name), None)]

    def chats(self, most: int = 1024) -> list[Asked]:
        """One request for each answer of a conversation. Raises TraceError."""
        return list(chats(self.path(SHAREGPT), counter(self.path(OPT)), most))

    def sessions(self, rate: float, seconds: float, pause_s: float, max_len: int) -> list[Asked]:
        """Conversations that begin at random, each question with all that was said before. Raises TraceError."""
        talks = list(conversations(self.path(SHAREGPT)))
        return sessions(talks, counter(self.path(LLAMA)), rate, seconds, pause_s, max_len)

    def translations(self) -> list[Asked]:
        """Raises TraceError."""
        return list(translations(self.path(SENTENCES), self.path(PAIRS), counter(self.path(LLAMA))))


@lru_cache(maxsize=8)
def _counted(name: str, path: Path, vocabulary: Path | None) -> tuple[Asked, ...]:
    read = first_turns if name == SHAREGPT else instructions
    return tuple(read(path, by_characters if vocabulary is None else counter(vocabulary)))


# --- Table 1 of the paper

TABLE_1 = {  # model: (device, ranks, slots of KV)
    "opt-13b": ("a100-40gb", 1, 15_700),
    "opt-66b": ("a100-40gb", 4, 9_700),
    "opt-175b": ("a100-80gb", 8, 60_100),
    "llama-2-13b": ("a100-40gb", 1, 15_700),  # as large as LLaMA-13B, of which the paper's section 6.4 speaks
}

REACH = Reach()


@dataclass(frozen=True, slots=True)
class Apart:
    """A machine on which prompts and decodes are never in one step: each has its own, one after the other."""

    machine: Machine

    def seconds(self, load: Load) -> tuple[float, float]:
        if not load.num_chunks or not load.num_rows:
            return self.machine.seconds(load)
        rows = replace(
            load, num_chunks=0, num_chunk_tokens=0, num_pairs=0, num_chunk_cells=0, num_sampled=load.num_rows
        )
        chunks = replace(load, num_rows=0, num_cells=0, num_moved=0, num_copied=0, num_sampled=load.num_chunks)
        moves_s, rows_s = self.machine.seconds(rows)
        return moves_s, rows_s + self.machine.seconds(chunks)[1]


ROW_S = 0.2e-3  # a sequence of a step, in the variant that `with_dear_rows` makes, beside what it computes


@dataclass(frozen=True, slots=True)
class DearRows:
    """A machine that takes more for every sequence of a step."""

    machine: Machine

    def seconds(self, load: Load) -> tuple[float, float]:
        moves_s, seconds = self.machine.seconds(load)
        return moves_s, seconds + ROW_S * (load.num_rows + load.num_chunks)


def with_dear_rows(setup: Setup) -> Setup:
    return replace(setup, machine=DearRows(setup.machine))


def setup_of(
    model: str,
    policy: str = "paged",
    block_size: int = 16,
    decoding: Decoding = PLAIN,
    reach: Reach = REACH,
    device: Device | None = None,
    **changed: Any,
) -> Setup:
    """A row of Table 1. `changed`: fields of Setup."""
    name, ranks, num_slots = TABLE_1[model]
    shape = known_shape(model, "float16", ranks)
    if shape is None:
        raise SystemExit(f"{model} is not split by {ranks}")
    layout = layout_for(shape, block_size, "float16")
    machine = Roofline(device or DEVICES[name], reach, shape, layout, "float16", ranks)
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


SLOWER_S = 10e-3  # a step of the variant that `slower` makes, beside what it computes


def slower(model: str, policy: str = "paged", decoding: Decoding = PLAIN) -> Setup:
    """With steps as a system of 2023 may have had them: not what we claim, but what explains some of the paper's."""
    setup = setup_of(model, policy, decoding=decoding, reach=replace(REACH, step_s=REACH.step_s + SLOWER_S))
    return replace(setup, machine=Apart(setup.machine))


MODEL, GPU = "llama-3.1-8b", "h100-80gb"
MODEL_OF_TODAY = "Llama-3.1-8B on one H100-80GB"


def served(block_size: int = 16, num_slots: int = 400_000, device: Device = DEVICES[GPU], **changed: Any) -> Setup:
    """A model of today on one device, as `kilburn serve` would run it. `changed`: fields of Setup."""
    shape = known_shape(MODEL, "bfloat16", 1)
    if shape is None:
        raise SystemExit(f"{MODEL} is not in the table of models")
    layout = layout_for(shape, block_size, "bfloat16")
    machine = Roofline(device, REACH, shape, layout, "bfloat16", 1)
    made = Setup(layout, machine, num_slots // block_size, max_rows=256, max_step_tokens=8192, max_len=32_768)
    return replace(made, **changed)


def replay(data: Data, name: str, speed: float, minutes: float, max_len: int = 32_768) -> list[Asked]:
    """The first minutes of a trace, as fast as that; cut to what is served. Raises TraceError."""
    seconds = minutes * 60 * data.share
    return [cut(asked, max_len) for asked in replayed(read_trace(data.path(name)), speed, seconds * speed)]


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
