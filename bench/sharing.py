"""What sharing blocks saves: the PagedAttention paper's §6.3, and a prefix shared by many requests (§6.4).

    python bench/sharing.py --alpaca alpaca_5000.json.gz --sharegpt sharegpt_sample.jsonl.gz --pairs newstest.tsv
    python bench/sharing.py ... --worker model        the bundled model instead of a worker without one

Saved memory is the paper's figure: of the blocks that would be needed without sharing, those that sharing saves. It is
read from the engine's own block pool after each step, and averaged over steps; the paper's are for OPT-13B. Beams share
what their search makes them share: `--worker fake` (the default) has the beams of an oracle that is no language model,
so for beams only `--worker model` says something of models. Samples share their prompt, whoever draws them.

The second table: translation prompts that begin with 1 or 5 examples. `shared`: the examples are a named prefix;
`alone`: each request has a salt of its own and shares nothing. Positions computed are exact; seconds mean something
only with a model. The paper's factors are against Orca (Oracle), another baseline: they stand beside, and are no
comparison.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, BeamSettings, Event, Finished, Pin, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.fake_daemon import fake_hello, limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.traces import Asked, TraceError, read_trace
from kilburn.shared.messages import Hello, StepPlan, StepResult, Welcome
from kilburn.shared.sampling import Sampling

PEER = b"bench.0"
PAPER = {  # percent saved, lowest and highest of each row of Figure 15
    ("alpaca", "samples"): "6.1-9.8",
    ("sharegpt", "samples"): "16.2-30.5",
    ("alpaca", "beams"): "37.6-55.2",
    ("sharegpt", "beams"): "44.3-66.3",
}
WIDTHS = {"samples": (2, 4, 6, 8), "beams": (2, 4, 6)}
PAPER_FACTORS = {1: 1.67, 5: 3.58}
MOST_CONTEXT = 1024  # longer requests are cut, so that several run together


class Worker:
    """Whatever runs plans: hello, a fresh run for each lease, and ids for texts."""

    def __init__(self, hello: Hello, new_run: Callable[[int], Callable[[StepPlan], StepResult]], ids: Any) -> None:
        self.hello, self.new_run, self.ids = hello, new_run, ids


def fake_worker(num_blocks: int) -> Worker:
    hello = fake_hello(num_blocks=num_blocks, max_rows=64, max_step_tokens=2048, max_len=4096, vocab_size=32_000)

    def ids(text: str) -> list[int]:
        # One id for four characters, equal for equal beginnings.
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        return [5 + int.from_bytes(piece.encode()[:8], "little") % 31_000 for piece in pieces]

    return Worker(hello, lambda lease: FakeWorker(lease, limits_of(hello), hello.vocab_size).run, ids)


def model_worker(num_blocks: int) -> Worker:
    from tokenizers import Tokenizer

    from kilburn.controller.prepared import prepared_folder
    from kilburn.shared.config import WorkerSettings
    from kilburn.shared.model_files import BUNDLED_NAME
    from kilburn.worker.start import make_ready

    folder = prepared_folder(BUNDLED_NAME, "")
    ready = make_ready(WorkerSettings(model=str(folder), name="bench", num_blocks=num_blocks))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def new_run(lease: int) -> Callable[[StepPlan], StepResult]:
        ready.executor.clear()
        return ready.executor.run

    return Worker(ready.hello, new_run, lambda text: tokenizer.encode(text).ids)


@dataclass(slots=True)
class Run:
    """One engine over one worker, from its first request to its last."""

    saved: float = 0.0  # sums over steps, in blocks
    needed: float = 0.0
    steps: int = 0
    copies: int = 0
    computed: int = 0  # token positions, of prompts and answers
    seconds: float = 0.0

    @property
    def percent(self) -> float:
        return 100 * self.saved / self.needed if self.needed else 0.0


def run(worker: Worker, events: Sequence[Event], on_step: Callable[[], None], pin: Pin | None = None) -> Run:
    engine, found = Engine(EngineSettings(max_waiting=1 << 20, step_deadline_s=1e9, silence_s=1e9)), Run()
    pending: list[Event] = [Arrived(PEER, worker.hello), *([pin] if pin is not None else [])]
    later, step_of = list(events), None
    begun = perf_counter()
    while pending or later:
        if not pending:  # the prefix is computed: now the requests come
            pending, later, begun = later, [], perf_counter()
        effects, pending = engine.handle(pending, now=0.0), []
        for effect in effects:
            match effect:
                case Send(message=Welcome(lease)):
                    step_of = worker.new_run(lease)
                case Send(message=StepPlan() as plan) if step_of is not None:
                    found.computed += sum(plan.counts)
                    pending.append(Arrived(PEER, step_of(plan)))
                case Finished(message=message) if message:
                    raise SystemExit(f"a request failed: {message}")
        (group,) = engine.snapshot().groups
        found.saved += group.shared_refs
        found.needed += group.owned_blocks + group.shared_refs
        found.copies, found.steps = group.block_copies, found.steps + 1
        on_step()
    found.seconds = perf_counter() - begun
    return found


def requests(worker: Worker, asked: Sequence[Asked], kind: str, width: int) -> list[Event]:
    rng, events = random.Random(1), list[Event]()
    for number, one in enumerate(asked):
        prompt = worker.ids(one.text) if one.text else [rng.randrange(5, 30_000) for _ in range(one.num_prompt)]
        prompt = prompt[: MOST_CONTEXT // 2] or [5]
        max_tokens = min(one.num_output, MOST_CONTEXT - len(prompt))
        sampling = Sampling(temperature=1.0, seed=number)  # no stop ids: answers are as long as those recorded
        beams = BeamSettings(width) if kind == "beams" else None
        events.append(Submit(number, prompt, max_tokens, sampling, n=width, beams=beams))
    return events


def saved_table(worker: Worker, files: dict[str, Path], num_requests: int, progress: Progress) -> tuple[Table, Any]:
    table = Table("requests", "decoding", "width", "saved %", "paper %", "copies", title="memory saved by sharing")
    rows: list[dict[str, Any]] = []
    for name, path in files.items():
        asked = read_trace(path)
        asked = random.Random(0).sample(asked, min(num_requests, len(asked)))
        for kind, widths in WIDTHS.items():
            for width in widths:
                task = progress.add_task(f"{name}, {kind}, {width}", total=None)
                found = run(worker, requests(worker, asked, kind, width), lambda task=task: progress.advance(task))
                progress.remove_task(task)
                paper = PAPER[name, kind]
                table.add_row(name, kind, str(width), f"{found.percent:.1f}", paper, str(found.copies))
                rows.append({"requests": name, "decoding": kind, "width": width, "saved": found.percent})
    return table, rows


def translation(path: Path, num_examples: int, num_requests: int) -> tuple[str, list[str]]:
    """The shared beginning, and the rest of each prompt. Rows: origin, number, English, ..., German."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.count("\t") >= 5]
    if len(rows) < num_examples + 1:
        raise TraceError(f"{path}: holds {len(rows)} rows of six columns, expected at least {num_examples + 1}")
    examples = "".join(f"English: {row[2]}\nGerman: {row[5]}\n\n" for row in rows[:num_examples])
    rest = [f"English: {row[2]}\nGerman:" for row in rows[num_examples:][:num_requests]]
    return "Translate from English to German.\n\n" + examples, rest


def prefix_table(worker: Worker, path: Path, num_requests: int, progress: Progress) -> tuple[Table, Any]:
    heads = ("examples", "prefix", "positions alone", "shared", "seconds alone", "shared", "factor", "paper")
    table, rows = Table(*heads, title="a shared prefix"), []
    for num_examples, paper in PAPER_FACTORS.items():
        prefix, rest = translation(path, num_examples, num_requests)
        prefix_ids = tuple(worker.ids(prefix))
        found = {}
        for is_shared in (False, True):
            events: list[Event] = []
            for i, text in enumerate(rest):
                salt = b"" if is_shared else i.to_bytes(4, "little") + b"alone"
                sampling = Sampling(temperature=0.0)
                events.append(Submit(i, worker.ids(prefix + text), 32, sampling, salt=salt))
            pin = Pin(1 << 40, prefix_ids, is_public=True) if is_shared else None
            task = progress.add_task(f"{num_examples} examples, {'shared' if is_shared else 'alone'}", total=None)
            found[is_shared] = run(worker, events, lambda task=task: progress.advance(task), pin)
            progress.remove_task(task)
        alone, shared = found[False], found[True]
        factor = alone.seconds / shared.seconds
        numbers = [alone.computed, shared.computed, f"{alone.seconds:.2f}", f"{shared.seconds:.2f}"]
        table.add_row(str(num_examples), str(len(prefix_ids)), *map(str, numbers), f"{factor:.2f}", f"{paper:.2f}")
        rows.append({"examples": num_examples, "alone": alone.computed, "shared": shared.computed, "factor": factor})
    return table, rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--alpaca", type=Path, help="instructions and answers")
    parser.add_argument("--sharegpt", type=Path, help="conversations")
    parser.add_argument("--pairs", type=Path, help="translations: tab-separated, English third and German sixth")
    parser.add_argument("--worker", choices=("fake", "model"), default="fake")
    parser.add_argument("--requests", type=int, default=64, help="of each file")
    parser.add_argument("--blocks", type=int, default=4096, help="of the pool, 16 positions each")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(words)
    files = {name: path for name in ("alpaca", "sharegpt") if (path := getattr(options, name)) is not None}
    if not files and options.pairs is None:
        parser.error("give --alpaca, --sharegpt or --pairs")
    worker = (fake_worker if options.worker == "fake" else model_worker)(options.blocks)
    written: dict[str, Any] = {"worker": options.worker}
    out = Console(width=110)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            if files:
                table, written["saved"] = saved_table(worker, files, options.requests, progress)
                out.print(table)
            if options.pairs is not None:
                table, written["prefix"] = prefix_table(worker, options.pairs, options.requests, progress)
                out.print(table)
    except (TraceError, OSError) as error:
        parser.error(str(error))
    out.print(f"worker: {options.worker}; the engine and its block pool are the real ones")
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
