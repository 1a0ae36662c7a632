"""Kilburn and other engines on one machine, side by side in one run.

    python bench/peers.py MODEL_FOLDER --side kilburn=http://127.0.0.1:8000 --side llama=http://127.0.0.1:8081 \\
        --side openvino=/venv/bin/python,genai,/models/f16.gguf --side ct2=/venv/bin/python,ctranslate2,/models/ct2

    W1    1 request, 128 prompt tokens, 128 generated
    W2    32 requests at once, 128 in, 64 out each
    W3    48 requests submitted at once, prompts 16..512, outputs 8..128 tokens, uniform; at most 16 run
    W4    24 requests at once, a common prefix of 512 tokens and 32 of their own, 32 out

A side is a server that speaks OpenAI's completions with token ids (its address), or an engine asked in process (the
Python that has it, its name in `peer_engines.py`, its model). The sides take turns, A B A B, on prompts that no round
repeats. Printed are the medians, the median of each round's ratio to the first side, the peak memory of each side's
processes, and how far the greedy answers agree. Start every server before, with the same weights, `--threads` as here,
and 16 as the most that run for W3, which `--max-running` says to engines in process. It installs nothing and starts no
server.

The floors are measured in the same run on the model's own shapes: the weights read once per decode step (GB/s), and the
products of all tokens (GFLOP/s, by the fastest of torch's float32 products), each prefix once, each head only where a
token is sampled. What a side reaches of a floor is a share of the machine, not of another engine.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.machine_limits import Limits, Shapes, measure_limits, shapes_of
from bench.process_memory import peak_mb, tree_that_listens, tree_under
from bench.serve import Answer, measure, parsed, prompt_of
from kilburn.controller.simulate.traces import MOONCAKE_BLOCK, Asked


@dataclass(frozen=True)
class Workload:
    """What is asked at once."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_common: int = 0  # leading tokens that all prompts share

    def drawn(self, round_number: int) -> list[Asked]:
        dice = random.Random(round_number)
        common = (round_number,) if self.num_common else ()
        return [
            Asked(None, dice.randint(*self.prompt_tokens), dice.randint(*self.output_tokens), prefix_blocks=common)
            for _ in range(self.num_requests)
        ]


WORKLOADS = {
    "W1": Workload(1, (128, 128), (128, 128)),
    "W2": Workload(32, (128, 128), (64, 64)),
    "W3": Workload(48, (16, 512), (8, 128)),
    "W4": Workload(24, (MOONCAKE_BLOCK + 32,) * 2, (32, 32), num_common=MOONCAKE_BLOCK),
}


@dataclass(frozen=True)
class Turn:
    """One workload on one side, once."""

    wall_s: float
    ttft_s: float  # median
    decode_per_s: float  # tokens after the first of each request, over the time from first to last
    tokens_per_s: float
    texts: tuple[str, ...]


class Side(Protocol):
    """Whoever answers; `peak_mb` is of all its processes since they began."""

    name: str

    def ask(self, asked: Sequence[Asked], round_number: int) -> Turn: ...
    def peak_mb(self) -> float: ...
    def close(self) -> None: ...


def turn_of(answers: Sequence[Answer], wall_s: float) -> Turn:
    decoded_s = sum(answer.last_s - answer.first_s for answer in answers)
    num_output = sum(answer.num_output for answer in answers)
    return Turn(
        wall_s,
        statistics.median(answer.first_s - answer.sent_s for answer in answers),
        (num_output - len(answers)) / decoded_s if decoded_s else 0.0,
        num_output / wall_s,
        tuple(answer.text for answer in answers),
    )


class Server:
    """A side behind an address."""

    def __init__(self, name: str, url: str, vocabulary: int) -> None:
        self.name, self.vocabulary = name, vocabulary
        self.url = url.rstrip("/")

    def ask(self, asked: Sequence[Asked], round_number: int) -> Turn:
        words = ["--url", self.url, "--requests", str(len(asked)), "--concurrency", str(len(asked))]
        options = parsed([*words, "--seed", str(round_number), "--vocabulary", str(self.vocabulary)])
        answers, wall_s, _ = asyncio.run(measure(options, Console(file=sys.stderr, quiet=True), asked))
        if faults := {answer.fault for answer in answers if answer.fault}:
            raise SystemExit(f"{self.name}: {faults.pop()}")
        return turn_of(answers, wall_s)

    def peak_mb(self) -> float:
        return peak_mb(tree_that_listens(urlsplit(self.url).port or 80))

    def close(self) -> None:
        pass  # not ours


class InProcess:
    """A side that another Python runs."""

    def __init__(
        self, name: str, words: list[str], vocabulary: int, tokenizer: Tokenizer, options: argparse.Namespace
    ) -> None:
        python, engine, model = words
        self.name, self.vocabulary, self.tokenizer = name, vocabulary, tokenizer
        command = [python, str(Path(__file__).with_name("peer_engines.py")), engine, model]
        command += ["--threads", str(options.threads), "--max-running", str(options.max_running)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")

    def _line(self, wanted: str = "") -> Any:
        for line in cast(IO[str], self.process.stdout):
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue  # the engine's own words
            if not wanted or said == wanted:
                return said
        raise SystemExit(f"{self.name}: ended with {self.process.wait()}; what it said is above")

    def ask(self, asked: Sequence[Asked], round_number: int) -> Turn:
        prompts = [prompt_of(one, index, round_number, self.vocabulary) for index, one in enumerate(asked)]
        stdin = cast(IO[str], self.process.stdin)
        begun = time.perf_counter()
        print(json.dumps({"prompts": prompts, "num_outputs": [a.num_output for a in asked]}), file=stdin, flush=True)
        said = self._line()
        wall_s = time.perf_counter() - begun
        answers = [
            Answer(
                0.0, one["first_s"], one["last_s"], num_output=len(one["ids"]), text=self.tokenizer.decode(one["ids"])
            )
            for one in said
        ]
        return turn_of(answers, wall_s)

    def peak_mb(self) -> float:
        return peak_mb(tree_under(self.process.pid))

    def close(self) -> None:
        cast(IO[str], self.process.stdin).close()
        self.process.wait()


def common_share(texts: Sequence[str], others: Sequence[str]) -> float:
    """Of the characters, how many stand before the first difference; 1.0: the answers agree."""
    same = 0
    for text, other in zip(texts, others, strict=True):
        differ = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
        same += next(differ, min(len(text), len(other)))
    return same / max(sum(map(len, texts)), 1)


def floor_s(asked: Sequence[Asked], workload: Workload, shapes: Shapes, limits: Limits) -> float:
    """Seconds that the machine needs for it at least."""
    computed = sum(a.num_prompt - workload.num_common for a in asked) + workload.num_common
    num_output = sum(a.num_output for a in asked)
    flops = shapes.flops_of_body * (computed + num_output - len(asked)) + shapes.flops_of_head * num_output
    read_s = max(a.num_output for a in asked) * shapes.bytes_of_weights / limits.read_bytes_per_s
    return max(flops / limits.flops_per_s, read_s)


HEADS = ("side", "wall s", "of the floor", "TTFT s", "decode tok/s", "tok/s", "ratio", "agrees")


def rows_of(turns: dict[str, list[Turn]], floors_s: list[float]) -> Iterator[tuple[str, ...]]:
    """A row for each side; ratios and agreement are with the first one's."""
    first = next(iter(turns.values()))
    for name, own in turns.items():
        ratios = [a.wall_s / b.wall_s for a, b in zip(own, first, strict=True)]
        shares = [floor / turn.wall_s for turn, floor in zip(own, floors_s, strict=True)]
        agrees = [common_share(a.texts, b.texts) for a, b in zip(own, first, strict=True)]
        columns = ((t.wall_s, t.ttft_s, t.decode_per_s, t.tokens_per_s) for t in own)
        wall_s, *rest = (statistics.median(column) for column in zip(*columns, strict=True))
        yield (
            name,
            f"{wall_s:.2f}",
            f"{100 * statistics.median(shares):.0f} %",
            *(f"{value:.3g}" for value in rest),
            f"{statistics.median(ratios):.2f}",
            f"{100 * statistics.median(agrees):.0f} %",
        )


def table_of(workload: str, turns: dict[str, list[Turn]], floors_s: list[float]) -> Table:
    table = Table(*HEADS, title=workload)
    for row in rows_of(turns, floors_s):
        table.add_row(*row)
    return table


def sides_of(options: argparse.Namespace, vocabulary: int) -> list[Side]:
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    sides: list[Side] = []
    for spec in options.side:
        name, _, where = spec.partition("=")
        if where.startswith(("http://", "https://")):
            sides.append(Server(name, where, vocabulary))
        elif where.count(",") == 2:
            sides.append(InProcess(name, where.split(","), vocabulary, tokenizer, options))
        else:
            raise SystemExit(f"--side {spec}: give NAME=http://... or NAME=PYTHON,ENGINE,MODEL")
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config.json and tokenizer.json of the model")
    parser.add_argument("--side", action="append", required=True, help="NAME=URL or NAME=PYTHON,ENGINE,MODEL")
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-running", type=int, default=32, help="of engines in process; 16 for W3")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, shapes = Console(), shapes_of(options.model)
    sides = sides_of(options, shapes.vocabulary)
    kept: dict[str, Any] = {"limits": [], "turns": {}, "floors_s": {}, "peak_mb": {}}
    try:
        for name in options.workloads.split(","):
            workload, turns, floors_s = WORKLOADS[name], {side.name: list[Turn]() for side in sides}, list[float]()
            for round_number in range(options.rounds):
                limits = measure_limits(shapes, options.threads)
                # No round's prompts are another's, nor those of an earlier run that a server may still remember.
                seed = random.SystemRandom().randrange(1 << 30)
                asked = workload.drawn(seed)
                floors_s.append(floor_s(asked, workload, shapes, limits))
                kept["limits"].append(asdict(limits))
                for side in sides:
                    turns[side.name].append(side.ask(asked, seed))
                    print(
                        f"{name} round {round_number + 1}: {side.name} {turns[side.name][-1].wall_s:.2f} s", flush=True
                    )
            console.print(table_of(name, turns, floors_s))
            kept["turns"][name] = {side: [asdict(turn) for turn in own] for side, own in turns.items()}
            kept["floors_s"][name] = floors_s
        for side in sides:
            kept["peak_mb"][side.name] = side.peak_mb()
            print(f"{side.name}: peak memory {kept['peak_mb'][side.name]:.0f} MB")
        print(f"read {limits.read_bytes_per_s / 1e9:.1f} GB/s, products {limits.flops_per_s / 1e9:.0f} GFLOP/s")
    finally:
        for side in sides:
            side.close()
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
