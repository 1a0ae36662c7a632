"""Frames as a bug or an enemy would make them: sound ones with bytes changed, cut, doubled, spliced, lengths inflated.

    python -m tests.wire.mutate 1000000 [SEED]

tries so many and prints what came of them. Only a message or a ProtocolError may come out of the codec.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator

from kilburn.shared.codec import decode_from_controller, decode_from_worker, encode
from kilburn.shared.types import ProtocolError
from tests.wire.samples import FROM_CONTROLLER, FROM_WORKER

SOUND = [encode(message) for message in (*FROM_WORKER.values(), *FROM_CONTROLLER.values())]
# The first byte of every kind of value that msgpack has, and lengths that promise much.
HEADS = [bytes([head]) for head in (*range(0xC0, 0x100), 0x80, 0x81, 0x90, 0x91, 0x9F, 0xA0, 0xBF, 0x7F)]
CLAIMS = [b"\xdd\x7f\xff\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]


def mutants(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        frame = bytearray(rng.choice(SOUND))
        for _ in range(rng.randint(1, 4)):
            _mutate(frame, rng)
        yield bytes(frame)


def _mutate(frame: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(frame) + 1)
    match rng.randrange(8):
        case 0:
            frame[at : at + 1] = bytes([rng.randrange(256)])
        case 1:
            del frame[at:]
        case 2:
            del frame[at : at + rng.randint(1, 8)]
        case 3:
            frame[at:at] = rng.randbytes(rng.randint(1, 8))
        case 4:
            frame[at:at] = frame[at : at + rng.randint(1, 32)]
        case 5:
            other = rng.choice(SOUND)
            frame[at:] = other[rng.randrange(len(other)) :]
        case 6:
            frame[at : at + 1] = rng.choice(HEADS)
        case _:
            frame[at : at + 1] = rng.choice(CLAIMS)


def outcome(frame: bytes) -> Counter[str]:
    """What both decoders make of a frame. Lets anything but a ProtocolError out."""
    seen: Counter[str] = Counter()
    for decode in (decode_from_worker, decode_from_controller):
        try:
            seen[type(decode(frame)).__name__] += 1
        except ProtocolError:
            seen["refused"] += 1
    return seen


def survey(count: int, seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for number, frame in enumerate(mutants(count, seed)):
        try:
            seen.update(outcome(frame))
        except Exception as error:
            raise AssertionError(f"frame {number} of seed {seed}, {frame.hex()}: {error!r}") from error
    return seen


if __name__ == "__main__":
    total, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    whole: Counter[str] = Counter()
    for part in range(0, total, 50_000):
        whole += survey(min(50_000, total - part), first_seed + part)
        print(f"\r{part + min(50_000, total - part):>10,} of {total:,} frames", end="", flush=True)
    print()
    for what, times in whole.most_common():
        print(f"{times:>10,}  {what}")
