"""The fake worker behind a real socket: what a controller meets on the wire, without a model.

It dials the controller as a DEALER, says Hello, and answers each plan after `delay_s`, in order, with the oracle's
tokens (or those of a given chooser). A plan that breaks the contract is answered by StepFailed, which ends the lease,
and is kept in `faults` for whoever started it. After Gone it says Hello again; after Drain it leaves.

    asyncio:   task = asyncio.create_task(serve_fake("tcp://127.0.0.1:9000"))        ... task.cancel()
    shell:     python -m kilburn.controller.simulate.fake_daemon --address tcp://127.0.0.1:9000
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import zmq
import zmq.asyncio

from kilburn.controller.simulate.fake_worker import Chooser, FakeWorker
from kilburn.controller.simulate.plan_rules import ContractBroken, Limits
from kilburn.shared.codec import decode_from_controller, encode
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import (
    Beat,
    Drain,
    Forget,
    FromController,
    Gone,
    Goodbye,
    Hello,
    Prepare,
    Reject,
    StepFailed,
    StepPlan,
    Welcome,
)

HIGH_WATER_MARK = 10_000  # messages; the fake never means to lose one
JOIN_AGAIN_S = 0.25


def fake_hello(
    name: str = "fake",
    *,
    model_digest: bytes = b"\x11" * 32,
    block_size: int = 16,
    num_blocks: int = 512,
    num_host_blocks: int = 0,
    max_rows: int = 64,
    max_step_tokens: int = 512,
    max_len: int = 2048,
    vocab_size: int = 512,
) -> Hello:
    """What a fake worker says of itself."""
    layout = KVLayout(block_size, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    pools = (num_blocks, num_host_blocks)
    return Hello(name, model_digest, layout, *pools, max_rows, max_step_tokens, max_len, vocab_size, pid=os.getpid())


def limits_of(hello: Hello) -> Limits:
    return Limits(
        hello.layout.block_size,
        hello.num_blocks,
        hello.num_host_blocks,
        hello.max_rows,
        hello.max_step_tokens,
        hello.max_len,
    )


@dataclass(slots=True)
class FakeDaemon:
    """One fake worker and its socket.

    `choose` replaces the oracle's tokens; `bad_rows` names the rows that go bad in a plan (they fail when they sample);
    `secure` sets CURVE keys on the socket before it connects.
    """

    address: str
    hello: Hello = field(default_factory=fake_hello)
    delay_s: float = 0.0
    choose: Chooser | None = None
    secure: Callable[[zmq.asyncio.Socket], None] | None = None
    bad_rows: Callable[[StepPlan], tuple[int, ...]] = lambda plan: ()
    faults: list[str] = field(default_factory=list)
    steps: int = 0  # plans answered, in all leases
    _worker: FakeWorker | None = None

    async def run(self) -> None:
        """Serve until told to drain, rejected or cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        try:
            self._connect(socket)
            await socket.send(encode(self.hello))
            await self._serve(socket)
        finally:
            socket.close(linger=0)
            context.term()

    def _connect(self, socket: zmq.asyncio.Socket) -> None:
        socket.setsockopt(zmq.IDENTITY, f"{self.hello.name}-{os.urandom(6).hex()}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(HIGH_WATER_MARK)
        if self.secure is not None:
            self.secure(socket)
        socket.connect(self.address)

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        beating: asyncio.Task[None] | None = None
        try:
            while True:
                message = decode_from_controller(await socket.recv())
                match message:
                    case Welcome(lease, beat_s):
                        self._worker = FakeWorker(lease, limits_of(self.hello), self.hello.vocab_size, self.choose)
                        if beating is not None:
                            beating.cancel()
                        beating = asyncio.create_task(self._beat(socket, self._worker, beat_s))
                    case StepPlan():
                        await self._answer(socket, message)
                    case _:
                        if await self._obey(socket, message):
                            return
        finally:
            if beating is not None:
                beating.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beating

    async def _obey(self, socket: zmq.asyncio.Socket, message: FromController) -> bool:
        """Whether the daemon should leave."""
        lease = self._worker.lease if self._worker is not None else None
        match message:
            case Prepare(lease=asked) if self._worker is not None and asked == lease:
                await socket.send(encode(self._worker.prepare(message)))
            case Forget(lease=asked) if self._worker is not None and asked == lease:
                self._worker.forget(message)
            case Gone(lease=gone) if gone == lease:
                self._worker = None
                await socket.send(encode(self.hello))
            case Gone(lease=0):  # another has the name still
                await asyncio.sleep(JOIN_AGAIN_S)
                await socket.send(encode(self.hello))
            case Drain(lease=drained) if drained == lease:
                await socket.send(encode(Goodbye("drained")))
                await asyncio.sleep(0.05)  # linger is 0: let the farewell leave
                return True
            case Reject(reason):
                self.faults.append(f"rejected: {reason}")
                return True
        return False

    async def _answer(self, socket: zmq.asyncio.Socket, plan: StepPlan) -> None:
        worker = self._worker
        if worker is None or plan.lease != worker.lease:
            return
        if self.delay_s > 0:
            await asyncio.sleep(self.delay_s)
        try:
            result = worker.run(plan, self.bad_rows(plan))
        except ContractBroken as broken:
            self.faults.append(str(broken))
            await socket.send(encode(StepFailed(plan.lease, plan.step, str(broken))))
            return
        self.steps += 1
        await socket.send(encode(result))

    async def _beat(self, socket: zmq.asyncio.Socket, worker: FakeWorker, beat_s: float) -> None:
        while True:
            await asyncio.sleep(beat_s)
            await socket.send(encode(Beat(worker.lease, worker.next_step - 1)))


async def serve_fake(
    address: str, *, hello: Hello | None = None, delay_s: float = 0.0, choose: Chooser | None = None
) -> None:
    """Be a fake worker of the controller at `address` until cancelled, drained or rejected."""
    await FakeDaemon(address, hello or fake_hello(), delay_s, choose).run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="fake_daemon", description="A worker without a model.")
    parser.add_argument("--address", required=True, help="the controller's, as tcp://127.0.0.1:9000")
    parser.add_argument("--name", default="fake")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds that each step takes")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=512)
    options = parser.parse_args()
    hello = fake_hello(
        options.name,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_rows=options.max_rows,
        max_len=options.max_len,
        vocab_size=options.vocab_size,
    )
    hello = replace(hello, boot=os.urandom(8).hex())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_fake(options.address, hello=hello, delay_s=options.delay_s))


if __name__ == "__main__":
    main()
