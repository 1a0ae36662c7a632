"""A load generator for any server that speaks OpenAI's completions, streamed.

    python bench/serve.py --requests 64 --concurrency 16 --prompt-tokens 16:512 --output-tokens 8:128
    python bench/serve.py --requests 200 --rate 4 --trace AzureLLMInferenceTrace_conv.csv.gz --json x.json

Closed loop (--concurrency): so many clients, each asks again when it was answered. Open loop (--rate): requests arrive
as a Poisson process, whether or not the server keeps up; with a trace that has times, --rate 0 keeps the trace's own,
divided by --speed-up. Prompts are random token ids (a trace's prefix ids give equal prefixes), or the trace's own text.

    TTFT        from sending to the first token                              s
    ITL         between one chunk with tokens and the next of its request    ms
    normalized  from sending to the last token, per generated token          s/token (the PagedAttention paper's figure)

--profile asks what the service itself counts: the worker's seconds by phase, and, where it runs on this machine, the
CPU time of the controller's process (all that it does: HTTP, text, core, wire) by token, by step, and as a share of
the time that a step takes. That share is what it costs a worker on the same cores.

numpy does the percentiles. The clocks are this process's: give it a core of its own, or its work is in the figures.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.process_memory import cpu_s, tree_that_listens
from kilburn.controller.simulate.traces import MOONCAKE_BLOCK, Asked, TraceError, read_trace

PERCENTILES = (50, 90, 95, 99)
FIRST_ID = 16  # of random prompts: clear of the special ids that most vocabularies begin with
WORKER_SECONDS = "kilburn_worker_seconds_total"  # by phase: idle, apply, forward, sample
STEPS = "kilburn_steps_total"


@dataclass(slots=True)
class Answer:
    """What became of one request; times are seconds on the client's clock."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    fault: str = ""
    text: str = ""


# --- what is asked


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 0 < found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give one such as 128, or a range 16:512")
    return found


def drawn(options: argparse.Namespace, dice: random.Random) -> list[Asked]:
    """Lengths uniform in their ranges, no times."""
    return [Asked(None, dice.randint(*options.prompt_tokens), dice.randint(*options.output_tokens))
            for _ in range(options.requests)]  # fmt: skip


def chosen(options: argparse.Namespace, dice: random.Random) -> list[Asked]:
    """The requests of this run: drawn or from a trace, cut to --max-len."""
    asked = drawn(options, dice)
    if options.trace is not None:
        recorded = read_trace(options.trace)
        if not all(a.num_prompt for a in recorded):
            raise TraceError(f"{options.trace}: says nothing of prompts; give a trace that does")
        # Without times its rows are a distribution to draw from; with times, a sequence to replay from its start.
        has_times = recorded[0].at_s is not None
        rows = sorted(recorded, key=lambda a: a.at_s or 0.0) if has_times else dice.sample(recorded, len(recorded))
        if len(rows) < options.requests:
            raise TraceError(f"{options.trace}: has {len(rows)} requests; give --requests {len(rows)} or fewer")
        asked = rows[: options.requests]
    if options.max_len:
        asked = [cut(a, options.max_len) for a in asked]
    return asked


def cut(asked: Asked, max_len: int) -> Asked:
    num_output = min(asked.num_output, max_len // 2)
    num_prompt = min(asked.num_prompt, max_len - num_output)
    # A text is cut by characters: at least one token per character, so what is left surely fits.
    return replace(asked, num_prompt=num_prompt, num_output=num_output, text=asked.text[:num_prompt])


def prompt_of(asked: Asked, index: int, seed: int, vocabulary: int) -> str | list[int]:
    if asked.text:
        return asked.text
    known = range(FIRST_ID, vocabulary)
    ids: list[int] = []
    for block in asked.prefix_blocks:
        if len(ids) >= asked.num_prompt:
            break
        ids += random.Random(f"{seed} block {block}").choices(known, k=MOONCAKE_BLOCK)
    own = random.Random(f"{seed} request {index}")
    return [*ids, *own.choices(known, k=max(asked.num_prompt - len(ids), 0))][: asked.num_prompt]


def starts(asked: Sequence[Asked], options: argparse.Namespace, dice: random.Random) -> list[float]:
    """Open loop: when each request is sent, in seconds from the start."""
    if options.rate:
        gaps = [dice.expovariate(options.rate) for _ in asked]
        return [float(at_s) for at_s in np.cumsum(gaps)]
    return [(a.at_s or 0.0) / options.speed_up for a in asked]


# --- asking


async def lines_of(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for raw in response.content:
        line = raw.decode().strip()
        if line.startswith("data:"):
            yield line[5:].strip()


async def ask(session: aiohttp.ClientSession, options: argparse.Namespace, asked: Asked, index: int) -> Answer:
    body = {
        "model": options.model,
        "prompt": prompt_of(asked, index, options.seed, options.vocabulary),
        "max_tokens": asked.num_output,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    answer = Answer(sent_s=time.perf_counter())
    try:
        async with session.post(f"{options.url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.fault = f"HTTP {response.status}: {(await response.text())[:200]}"
                return answer
            async for line in lines_of(response):
                if line == "[DONE]":
                    break
                read_chunk(answer, json.loads(line), time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    if not answer.fault and not answer.first_s:
        answer.fault = "the stream ended without a token"
    return answer


def read_chunk(answer: Answer, chunk: dict[str, Any], now_s: float) -> None:
    if "error" in chunk:
        answer.fault = str(chunk["error"])[:200]
    if chunk.get("choices"):
        if answer.first_s:
            answer.gaps_s.append(now_s - answer.last_s)
        else:
            answer.first_s = now_s
        answer.last_s = now_s
        answer.text += chunk["choices"][0].get("text") or ""
    if usage := chunk.get("usage"):
        answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]


async def closed_loop(asked: Sequence[Asked], clients: int, one: Callable[[int], Awaitable[None]]) -> None:
    waiting = iter(range(len(asked)))

    async def client() -> None:
        for index in waiting:
            await one(index)

    await asyncio.gather(*(client() for _ in range(clients)))


async def open_loop(times_s: Sequence[float], one: Callable[[int], Awaitable[None]]) -> None:
    begun = time.perf_counter()

    async def later(index: int, at_s: float) -> None:
        await asyncio.sleep(max(begun + at_s - time.perf_counter(), 0.0))
        await one(index)

    await asyncio.gather(*(later(index, at_s) for index, at_s in enumerate(times_s)))


@dataclass(frozen=True)
class Spending:
    """What the service has spent so far."""

    phases_s: dict[str, float]  # where the worker's seconds went, summed over workers
    num_steps: int = 0
    controller_s: float = 0.0  # CPU time of the process that listens; 0: it is not on this machine

    def since(self, before: "Spending") -> "Spending":
        phases_s = {phase: seconds - before.phases_s.get(phase, 0.0) for phase, seconds in self.phases_s.items()}
        return Spending(phases_s, self.num_steps - before.num_steps, self.controller_s - before.controller_s)


NOTHING = Spending({})


async def spending(session: aiohttp.ClientSession, url: str) -> Spending:
    """By /metrics, and by the clock of the controller's process."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    phases_s: dict[str, float] = {}
    num_steps = 0
    for line in text.splitlines():
        if line.startswith(WORKER_SECONDS + "{"):
            phase = line.partition('phase="')[2].partition('"')[0]
            phases_s[phase] = phases_s.get(phase, 0.0) + float(line.rsplit(" ", 1)[1])
        elif line.startswith((STEPS + "{", STEPS + " ")):
            num_steps += int(float(line.rsplit(" ", 1)[1]))
    return Spending(phases_s, num_steps, controller_cpu_s(url))


def controller_cpu_s(url: str) -> float:
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost", "::1"):
        return 0.0
    return cpu_s(tree_that_listens(address.port or 80)[0])


async def measure(
    options: argparse.Namespace, console: Console, asked: Sequence[Asked] = ()
) -> tuple[list[Answer], float, Spending]:
    """Answers in the order of what was asked (of `options`, if nothing is given), seconds, what the service spent."""
    dice = random.Random(options.seed)
    asked = asked or chosen(options, dice)
    answers = [Answer(0.0) for _ in asked]
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    columns = (TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=options.timeout)
    ) as session:
        if not options.model:
            options.model = await only_model(session, options.url)
        before = await spending(session, options.url) if options.profile else NOTHING
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=len(asked))

            async def one(index: int) -> None:
                answers[index] = await ask(session, options, asked[index], index)
                progress.advance(bar)

            begun = time.perf_counter()
            if options.concurrency:
                await closed_loop(asked, options.concurrency, one)
            else:
                await open_loop(starts(asked, options, dice), one)
            wall_s = time.perf_counter() - begun
        after = await spending(session, options.url) if options.profile else NOTHING
    return answers, wall_s, after.since(before)


async def only_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


# --- reporting


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} | {"max": float(np.max(values))}


def report(answers: Sequence[Answer], wall_s: float, spent: Spending = NOTHING) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.fault]
    num_prompt, num_output = sum(a.num_prompt for a in good), sum(a.num_output for a in good)
    made: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "faults": sorted({a.fault for a in answers if a.fault})[:5],
        "wall_s": wall_s,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "total_tokens_per_s": (num_prompt + num_output) / wall_s,
        "ttft_s": spread([a.first_s - a.sent_s for a in good]),
        "itl_ms": spread([1e3 * gap for a in good for gap in a.gaps_s]),
        "normalized_s": spread([(a.last_s - a.sent_s) / max(a.num_output, 1) for a in good]),
    }
    if spent.phases_s:
        all_s, idle_s = sum(spent.phases_s.values()), spent.phases_s.get("idle", 0.0)
        made["worker_s"] = spent.phases_s
        made["worker_idle_share"] = idle_s / all_s if all_s else 0.0
        if spent.controller_s and all_s > idle_s and spent.num_steps and num_output:
            made["controller"] = {
                "us_per_token": 1e6 * spent.controller_s / num_output,
                "us_per_step": 1e6 * spent.controller_s / spent.num_steps,
                "step_ms": 1e3 * (all_s - idle_s) / spent.num_steps,
                "share_of_step": spent.controller_s / (all_s - idle_s),
            }
    return made


def show(made: dict[str, Any], console: Console) -> None:
    console.print(
        f"{made['requests']} requests in {made['wall_s']:.1f} s, {made['failed']} failed; "
        f"{made['output_tokens_per_s']:.1f} generated tokens/s, {made['total_tokens_per_s']:.1f} in all, "
        f"{made['requests_per_s']:.2f} requests/s"
    )
    table = Table("", "mean", *(f"p{p}" for p in PERCENTILES), "max")
    for key, name in (("ttft_s", "TTFT s"), ("itl_ms", "ITL ms"), ("normalized_s", "normalized s/token")):
        table.add_row(name, *(f"{value:.4g}" for value in made[key].values()))
    console.print(table)
    if "worker_s" in made:
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in made["worker_s"].items())
        console.print(f"worker: {phases}; idle between steps {100 * made['worker_idle_share']:.1f} % of its time")
    if "controller" in made:
        told = made["controller"]
        console.print(
            f"controller: {told['us_per_token']:.0f} us of CPU a token, {told['us_per_step']:.0f} us a step of "
            f"{told['step_ms']:.1f} ms: {100 * told['share_of_step']:.1f} %"
        )
    for fault in made["faults"]:
        console.print(f"failed: {fault}", markup=False)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address without /v1")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--requests", type=int, default=64)
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=0, help="closed loop of so many clients")
    loop.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second; 0: the trace's times")
    parser.add_argument("--prompt-tokens", type=span, default=(128, 128), help="N, or LOW:HIGH for uniform")
    parser.add_argument("--output-tokens", type=span, default=(64, 64), help="N, or LOW:HIGH for uniform")
    parser.add_argument(
        "--trace", type=Path, help="lengths (and times) from a file: Azure CSV, Mooncake JSONL, ShareGPT"
    )
    parser.add_argument("--speed-up", type=float, default=1.0, help="divide the trace's times by this")
    parser.add_argument("--max-len", type=int, default=0, help="cut requests to so many tokens; 0: as they are")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="random prompts use token ids below this")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until a request counts as failed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--profile", action="store_true", help="also what the service spent: the worker's seconds, the controller's CPU"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(words)
    options.url = options.url.rstrip("/")
    if options.vocabulary <= FIRST_ID:
        parser.error(f"--vocabulary must be above {FIRST_ID}")
    if options.requests < 1 or options.concurrency < 0 or options.rate < 0 or options.speed_up <= 0:
        parser.error("--requests and --speed-up must be above 0, --concurrency and --rate not below it")
    if not options.concurrency and not options.rate and options.trace is None:
        parser.error("give --concurrency N, --rate R, or a --trace with times")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options, console = parsed(words), Console(stderr=False)
    try:
        made = report(*asyncio.run(measure(options, Console(stderr=True))))
    except (TraceError, aiohttp.ClientError) as error:
        print(f"bench/serve.py: {error}", file=sys.stderr)
        return 2
    show(made, console)
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=2) + "\n")
    return 1 if made["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
