"""What a streamed token costs at the edge: HTTP, text and the core, with a worker that answers at once.

    python bench/edge.py                     a table: 1, 64 and 512 streams
    python bench/edge.py --streams 64        one of them
    python bench/edge.py --depth 1           an event for each token
    python bench/edge.py --profile out.prof  and where the time goes, for pstats

Three processes: the controller as it serves, which is measured; a worker without a model, which draws the next word of
a fixed text; clients that read raw sockets. CPU time is all that the controller's process spent between the first
request and the last byte, setting up the requests included; `system` is what of it the kernel spent, on sockets mostly.
`a core` is how many tokens a second one core would stream: a million over the CPU time of one. On a machine with fewer
cores than processes, seconds say little. The worker answers both plans that are under way before it is looked at
again, so that most events are of two tokens; with `--depth 1` each is of one, as it is where steps take their time.

The tokenizer is a byte-level one made on the spot; --model takes another's folder.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kilburn.controller.app import running_controller
from kilburn.shared.codec import decode_from_controller, encode
from kilburn.shared.config import ControllerSettings
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Beat, Gone, Hello, StepPlan, StepResult, Welcome

TEXT = "It is a truth universally acknowledged, that a stream of tokens — 漢字, \U0001f600 and all — must be read. " * 8
NUM_PROMPT, BLOCK_SIZE = 16, 16


def write_model(folder: Path) -> None:
    """What a controller needs of a model folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1 << 20, "vocab_size": 400}))


def be_worker(endpoint: str, hello: Hello, words: list[int]) -> None:
    """Answers each plan at once: a row that reaches the end of what it knows draws the word of its position."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"bench.edge")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(encode(hello))
        ends: dict[int, list[int]] = {}  # row -> [positions computed, positions known]
        lease = 0
        while True:
            if not socket.poll(500):
                socket.send(encode(Beat(lease, 0)))
                continue
            match decode_from_controller(socket.recv()):
                case StepPlan() as plan:
                    socket.send(encode(_answered(plan, ends, words)))
                case Welcome(lease):
                    pass
                case Gone():
                    return
                case _:
                    pass


def _answered(plan: StepPlan, ends: dict[int, list[int]], words: list[int]) -> StepResult:
    for admit in plan.admits:
        ends[admit.row] = [admit.start, admit.start + len(admit.tokens)]
    num_tokens, tokens = [], []
    for row, count in zip(plan.rows, plan.counts, strict=True):
        end = ends[row]
        end[0] += count
        num_tokens.append(int(end[0] >= end[1]))
        if num_tokens[-1]:
            end[1] = end[0] + 1
            tokens.append(words[end[0] % len(words)])
    return StepResult(plan.lease, plan.step, num_tokens, tokens)


def be_clients(host: str, port: int, num_streams: int, num_tokens: int, told: "Connection[float, int]") -> None:
    told.send(asyncio.run(_read_all(host, port, num_streams, num_tokens)))


async def _read_all(host: str, port: int, num_streams: int, num_tokens: int) -> tuple[float, int]:
    """(seconds, events) of all streams at once."""
    begun = time.perf_counter()
    counts = await asyncio.gather(*(_read(host, port, i, num_tokens) for i in range(num_streams)))
    return time.perf_counter() - begun, sum(counts)


async def _read(host: str, port: int, number: int, num_tokens: int) -> int:
    prompt = [number % 251] * NUM_PROMPT
    body = json.dumps({"prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write((head + body).encode())
    num_events, tail = 0, b""
    while data := await reader.read(1 << 16):
        num_events += data.count(b'"text"')
        tail = (tail + data)[-64:]
    writer.close()
    if b"data: [DONE]" not in tail:
        raise RuntimeError(f"stream {number} ended early: {tail!r}")
    return num_events


async def measure(
    model: Path, num_streams: int, num_tokens: int, depth: int, profile: cProfile.Profile | None
) -> dict[str, float]:
    """One row of the table."""
    spawn = multiprocessing.get_context("spawn")
    settings = ControllerSettings(
        model=str(model), port=0, bind="tcp://127.0.0.1:0", max_waiting=4096, max_step_tokens=1 << 14, depth=depth
    )
    length = NUM_PROMPT + num_tokens
    num_blocks = (num_streams + 1) * blocks_for(length, BLOCK_SIZE)
    hello = Hello(
        "edge", bytes(32), KVLayout(BLOCK_SIZE, 1, 1, 8, "float32"), num_blocks, 0, 1024, 1 << 14, length, 400
    )
    words: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    async with running_controller(settings) as running:
        worker = spawn.Process(target=be_worker, args=(running.endpoint, hello, words), daemon=True)
        worker.start()
        while not running.is_ready():
            await asyncio.sleep(0.01)
        ours, theirs = multiprocessing.Pipe()
        host, port = running.http_address.removeprefix("http://").rsplit(":", 1)
        clients = spawn.Process(target=be_clients, args=(host, int(port), num_streams, num_tokens, theirs), daemon=True)
        clients.start()
        counts = running.driver.streams.counts
        while not running.driver.streams.num_answers:
            await asyncio.sleep(0.0005)
        if profile is not None:
            profile.enable()
        begun, before = os.times(), counts.output_tokens
        while not ours.poll():
            await asyncio.sleep(0.005)
        ended, told = os.times(), counts.output_tokens - before
        system_s = ended.system - begun.system
        cpu_s = ended.user - begun.user + system_s
        if profile is not None:
            profile.disable()
        seconds, num_events = ours.recv()
        clients.join()
        worker.terminate()
        worker.join()
    return {
        "streams": num_streams,
        "tokens": num_streams * num_tokens,
        "seconds": seconds,
        "tokens/s": num_streams * num_tokens / seconds,
        "events/token": num_events / (num_streams * num_tokens),
        "CPU us/token": cpu_s / told * 1e6,
        "of it system": system_s / told * 1e6,
        "a core": told / cpu_s,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a streamed token costs at the edge.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512], help="at once")
    parser.add_argument("--tokens", type=int, default=60_000, help="in all streams together, 2000 in one at most")
    parser.add_argument("--depth", type=int, default=2, help="plans under way at once")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer; empty: one is made")
    parser.add_argument("--profile", type=Path, help="file for the profile of the controller's process")
    parser.add_argument("--json", type=Path, help="file for the figures")
    wanted = parser.parse_args(words)
    profile = cProfile.Profile() if wanted.profile else None
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = wanted.model or Path(scratch)
        if wanted.model is None:
            write_model(model)
        for num_streams in wanted.streams:
            num_tokens = max(min(wanted.tokens // num_streams, 2000), 1)
            row = asyncio.run(measure(model, num_streams, num_tokens, wanted.depth, profile))
            if not rows:
                print("  ".join(f"{name:>13}" for name in row))
            rows.append(row)
            print(
                "  ".join(f"{value:>13,.1f}" if isinstance(value, float) else f"{value:>13,}" for value in row.values())
            )
    if profile is not None:
        profile.dump_stats(wanted.profile)
    if wanted.json:
        wanted.json.write_text(json.dumps({"rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
