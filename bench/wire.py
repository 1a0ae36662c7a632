"""What the wire costs: the codec, a message through each link, and how long a plan takes to reach the step thread.

    python bench/wire.py              a table
    python bench/wire.py --json       the same as JSON

The worker is a process of its own, as in service. It answers each plan with a result as soon as `receive` returns;
`one way` is half of a round trip without codec times, `sent to received` compares the two processes' monotonic clocks,
which are one clock on one machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable

from kilburn.controller.core.events import Arrived, Left
from kilburn.controller.link import ControllerLink
from kilburn.shared import messages as m
from kilburn.shared.codec import decode_from_controller, decode_from_worker, encode
from kilburn.shared.layout import KVLayout
from kilburn.shared.sampling import Sampling
from kilburn.worker.link import WorkerLink

HELLO = m.Hello("bench", bytes(32), KVLayout(16, 2, 2, 16, "float32"), 64, 64, 512, 4096, 4096, 32000)


def plan_of(num_rows: int, step: int = 1) -> m.StepPlan:
    """Decodes, one in sixteen of which takes a new block."""
    grown = list(range(0, num_rows, 16))
    return m.StepPlan(1, step, list(range(num_rows)), [1] * num_rows, grown, [7 * g for g in grown])


def result_of(num_rows: int, step: int = 1) -> m.StepResult:
    return m.StepResult(1, step, [1] * num_rows, [31 * i % 32000 for i in range(num_rows)])


def admits_of(num_rows: int) -> m.StepPlan:
    """Rows that begin with a prompt of 64 tokens."""
    admits = [m.Admit(i, 0, 64, tuple(range(64)), (), (i, i + 1, i + 2, i + 3), Sampling()) for i in range(num_rows)]
    return m.StepPlan(1, 1, list(range(num_rows)), [64] * num_rows, admits=admits)


def best_us(act: Callable[[], object]) -> float:
    """The least of five rounds, in microseconds a call."""
    calls, rounds = 400, []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            act()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return min(rounds)


def codec_rows() -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    cases: list[tuple[str, m.Message, Callable[[bytes], m.Message]]] = [
        ("plan of 64 decodes", plan_of(64), decode_from_controller),
        ("plan of 256 decodes", plan_of(256), decode_from_controller),
        ("plan of 1024 decodes", plan_of(1024), decode_from_controller),
        ("plan of 8 admits", admits_of(8), decode_from_controller),
        ("result of 256 tokens", result_of(256), decode_from_worker),
        ("beat", m.Beat(1, 1), decode_from_worker),
    ]
    for name, message, decode in cases:
        frame = encode(message)
        encode_us = best_us(lambda message=message: encode(message))
        decode_us = best_us(lambda frame=frame, decode=decode: decode(frame))
        rows.append({"message": name, "bytes": len(frame), "encode_us": encode_us, "decode_us": decode_us})
    return rows


def echo(endpoint: str, times: "multiprocessing.connection.Connection[float, float]") -> None:
    """The worker: answers each plan, and tells when each came."""
    link = WorkerLink(endpoint, "bench")
    link.send(HELLO)
    arrived: list[float] = []
    while True:
        match link.receive(30.0):
            case m.StepPlan(lease, step, rows):
                arrived.append(time.monotonic())
                link.send(m.StepResult(lease, step, [1] * len(rows), [5] * len(rows)))
            case m.Welcome():
                pass
            case _:
                break
    times.send(arrived)
    link.close()


async def round_trips(num_rows: int, num_trips: int, pause_s: float) -> dict[str, float]:
    inbox: asyncio.Queue[Arrived | Left] = asyncio.Queue()

    def deliver(events: list[Arrived | Left]) -> None:
        for event in events:
            inbox.put_nowait(event)

    link = ControllerLink("tcp://127.0.0.1:0", deliver)
    await link.start()
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=echo, args=(link.endpoint, theirs))
    worker.start()
    peer = (await inbox.get()).peer
    link.send(peer, m.Welcome(1, 1.0, 30.0, 2))
    sent, trips = [], []
    for step in range(1, num_trips + 1):
        plan = plan_of(num_rows, step)
        await asyncio.sleep(pause_s)
        sent.append(time.monotonic())
        link.send(peer, plan)
        while not isinstance((await inbox.get()).message, m.StepResult):
            pass
        trips.append(time.monotonic() - sent[-1])
    link.send(peer, m.Gone(1, "done"))
    arrived = ours.recv()
    worker.join()
    await link.close()
    one_way = sorted([(there - here) * 1e6 for here, there in zip(sent, arrived, strict=True)])
    return {
        "rows": num_rows,
        "sent_to_received_us_p50": statistics.median(one_way),
        "sent_to_received_us_p90": one_way[len(one_way) * 9 // 10],
        "round_trip_us_p50": statistics.median(trips) * 1e6,
    }


async def flood(num_frames: int) -> dict[str, float]:
    """Controller seconds per message when they come as fast as one worker can send them."""
    seen, done = 0, asyncio.Event()

    def deliver(events: list[Arrived | Left]) -> None:
        nonlocal seen
        seen += len(events)
        if seen > num_frames:
            done.set()

    link = ControllerLink("tcp://127.0.0.1:0", deliver)
    await link.start()
    worker = multiprocessing.get_context("spawn").Process(target=pour, args=(link.endpoint, num_frames))
    worker.start()
    while seen < 1:
        await asyncio.sleep(0.01)
    cpu = time.thread_time()
    await done.wait()
    cpu = time.thread_time() - cpu
    worker.terminate()
    worker.join()
    await link.close()
    return {"frames": num_frames, "controller_us_per_beat": cpu / num_frames * 1e6}


def pour(endpoint: str, num_frames: int) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"bench.pour")
        socket.connect(endpoint)
        socket.send(encode(HELLO))
        time.sleep(0.3)
        beat = encode(m.Beat(1, 1))
        for _ in range(num_frames):
            socket.send(beat)
        time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trips", type=int, default=300)
    options = parser.parse_args()
    figures = {
        "codec": codec_rows(),
        "links": [asyncio.run(round_trips(n, options.trips, pause_s=0.005)) for n in (1, 256)],
        "flood": [asyncio.run(flood(20_000))],
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, rows in figures.items():
        print(f"\n{name}")
        print("  ".join(f"{column:>24}" for column in rows[0]))
        for row in rows:
            print("  ".join(f"{v:>24.1f}" if isinstance(v, float) else f"{v:>24}" for v in row.values()))


if __name__ == "__main__":
    main()
