"""Every message comes back as it went, its bytes are those of yesterday, and a frame that is no message is refused."""

import contextlib
import math
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.shared import messages as m
from kilburn.shared.codec import WrongVersion, decode_from_controller, decode_from_worker, encode, encode_reject
from kilburn.shared.fields import MAX_FRAME_BYTES, MAX_TEXT_BYTES, check_complete
from kilburn.shared.types import LawBroken, ProtocolError
from tests.wire.mutate import mutants, survey
from tests.wire.samples import ANY, FROM_CONTROLLER, FROM_WORKER, HELLO

GOLDEN = Path(__file__).with_name("golden.txt")
WORKER_KINDS = m.FromWorker.__args__
CONTROLLER_KINDS = m.FromController.__args__
# Fields since the first build of this version: an older peer leaves them out.
APPENDED = {m.Hello: 3, m.StepResult: 1, m.Welcome: 1, m.StepPlan: 1}


def golden_lines() -> list[str]:
    named = [("worker", FROM_WORKER), ("controller", FROM_CONTROLLER)]
    return [f"{side}: {name}: {encode(message).hex()}" for side, of in named for name, message in of.items()]


def test_bytes_are_those_of_the_committed_file() -> None:
    """A peer of the same version may be an older build: whoever changes these bytes changes PROTOCOL_VERSION."""
    assert golden_lines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_a_hello_of_an_older_build_lacks_what_was_appended_since() -> None:
    frame = bytes.fromhex(
        "9e0101a27730c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f96101e0340a86266"
        "6c6f6174313608cd03e8ccc8cd0100cd0800cd2000cdc0000102cd1267"
    )
    assert decode_from_worker(frame) == replace(HELLO, memory=m.WorkerMemory(), rendezvous="", boot="")
    short = msgpack.unpackb(frame)[:-1]
    with pytest.raises(ProtocolError, match="lacks fields"):
        decode_from_worker(msgpack.packb(short))


def test_a_plan_and_a_result_of_an_older_build_lack_what_was_appended_since() -> None:
    plan, result = FROM_CONTROLLER["plan"], FROM_WORKER["result"]
    raw = msgpack.unpackb(encode(plan))[:-1]
    admit = raw[8][0]
    raw[8][0] = [*admit[:6], admit[6][:-3]]
    unbound = replace(plan.admits[0], sampling=replace(plan.admits[0].sampling, grammar=b""))
    assert decode_from_controller(msgpack.packb(raw)) == replace(plan, admits=[unbound], allowed_s=0.0)
    raw[8][0][6] = raw[8][0][6][:-1]
    with pytest.raises(ProtocolError, match="Sampling of 12"):
        decode_from_controller(msgpack.packb(raw))
    short = msgpack.packb(msgpack.unpackb(encode(result))[:-1])
    assert decode_from_worker(short) == replace(result, prompt_logprobs=())


@pytest.mark.parametrize("line", GOLDEN.read_text(encoding="utf-8").splitlines())
def test_golden_frames_decode(line: str) -> None:
    side, name, frame = line.split(": ")
    if side == "worker":
        assert decode_from_worker(bytes.fromhex(frame)) == FROM_WORKER[name]
    else:
        assert decode_from_controller(bytes.fromhex(frame)) == FROM_CONTROLLER[name]


def test_every_kind_is_tested() -> None:
    assert set(ANY) == {*WORKER_KINDS, *CONTROLLER_KINDS}
    assert {type(x) for x in FROM_WORKER.values()} == set(WORKER_KINDS)
    assert {type(x) for x in FROM_CONTROLLER.values()} == set(CONTROLLER_KINDS)


@pytest.mark.parametrize("kind", list(ANY))
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(ANY[kind])
    frame = encode(message)
    for kinds, decode in ((WORKER_KINDS, decode_from_worker), (CONTROLLER_KINDS, decode_from_controller)):
        if kind in kinds:
            back = decode(frame)
            assert back == message
            assert encode(back) == frame
        else:
            with pytest.raises(ProtocolError):
                decode(frame)  # each side's words mean nothing on the other


@pytest.mark.parametrize("kind", list(ANY))
@settings(max_examples=5, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_extra_fields_are_skipped(kind: type, data: st.DataObject) -> None:
    message = data.draw(ANY[kind])
    decode = decode_from_worker if kind in WORKER_KINDS else decode_from_controller
    raw = msgpack.unpackb(encode(message))
    assert decode(msgpack.packb([*raw, "new", [[1], {"of": "a newer peer"}]])) == message
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(raw[: -1 - APPENDED.get(kind, 0)]))


def changed(message: m.Message, at: int, value: object) -> bytes:
    raw = msgpack.unpackb(encode(message))
    raw[at] = value
    return msgpack.packb(raw)


# (message, place in its array, what it may not be)
REFUSED = [
    ("welcome", 0, True),
    ("welcome", 0, 1.0),
    ("welcome", 1, 32.0),
    ("welcome", 1, -1),
    ("welcome", 2, True),
    ("welcome", 2, 9.0),
    ("welcome", 2, -1),
    ("welcome", 2, 2**63),
    ("welcome", 3, math.nan),
    ("welcome", 3, math.inf),
    ("welcome", 3, 1),
    ("welcome", 5, 0),
    ("welcome", 6, b"bytes"),
    ("welcome", 6, "x" * (MAX_TEXT_BYTES + 1)),
    ("plan", 4, b"\xff\xff\xff\xff"),
    ("plan", 4, b"\0\0\0"),
    ("plan", 4, [3, 0, 1]),
    ("plan", 5, b"\0\0\0\0"),
    ("plan", 5, b"\1\0\0\0" * 4),
    ("plan", 6, b"\3\0\0\0" * 3),
    ("plan", 7, b"\0\0\0\0"),
    ("plan", 8, b""),
    ("plan", 9, b"\0\0\0\0"),
    ("hello", 3, b"short"),
    ("hello", 4, [16, 30, 3, 64, "int4", 8]),
    ("hello", 4, [True, 30, 3, 64, "int8", 8]),
    ("hello", 4, [16, 30, 3, 64, "int8"]),
    ("result", 4, 2**31 - 1),
    ("result", 4, 0),
    ("result", 5, b"\2\0\0\0"),
    ("result", 7, [[9, "no such advance"]]),
    ("result", 7, [[1, "twice"], [1, "twice"]]),
    ("result", 7, [[1, "three", 3]]),
    ("result", 7, {1: "a map"}),
    ("result", 8, [[0, 2, 17, 4]]),
    ("result", 8, [[0, True, 17, 4]]),
    ("result", 9, [[2, 3, b"", b""]]),
    ("result", 9, [[2, 1, b"\1\0\0\0" * 2, b"\0\0\xc0\x7f" * 2]]),
    ("result", 9, [[2, 1, b"\1\0\0\0" * 2, b"\0\0\x80\x7f" * 2]]),
    ("result", 10, [0.0, 0.0, 0.0, 0]),
    ("result", 11, [[1, 4, 2, b"\1\0\0\0" * 2, b"\0\0\0\0" * 2, b""]]),
    ("result", 11, [[1, 4, 2, b"\1\0\0\0" * 2, b"\0\0\0\0", b"\1\0\0\0"]]),
    ("result", 11, [[1, 0, 1, b"\1\0\0\0", b"\0\0\0\0", b"\1\0\0\0"]]),
    ("result", 11, [[9, 4, 1, b"\1\0\0\0", b"\0\0\0\0", b"\1\0\0\0"]]),
]


@pytest.mark.parametrize(("name", "at", "value"), REFUSED)
def test_refused(name: str, at: int, value: object) -> None:
    message = FROM_WORKER.get(name) or FROM_CONTROLLER[name]
    decode = decode_from_worker if name in FROM_WORKER else decode_from_controller
    assert decode(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode(changed(message, at, value))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x93\x01\x03",
        b"\x94\x01\x03\x09\x05\x00",
        b"\x81\x01\x03",
        b"\xc1" * 9,
        b"\x91" * 5000,
        b"\x94\x01\x03\xd4\x00\x00\x05",
        b"\x94\x01\x03\xc7\x00\x00\x05",
        b"\xc7\x04\x01abcd",
        b"\0" * (MAX_FRAME_BYTES + 1),
    ],
)
def test_no_message(frame: bytes) -> None:
    for decode in (decode_from_worker, decode_from_controller):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_another_version_is_told_so_in_its_own() -> None:
    with pytest.raises(WrongVersion) as caught:
        decode_from_worker(changed(FROM_WORKER["hello"], 0, 7))
    assert (caught.value.version, caught.value.is_hello) == (7, True)
    with pytest.raises(WrongVersion) as caught:
        decode_from_worker(b"\x92\x07\x02")
    assert not caught.value.is_hello
    assert msgpack.unpackb(encode_reject("too old", 7)) == [7, 33, "too old"]
    assert decode_from_controller(encode_reject("too old", m.PROTOCOL_VERSION)) == m.Reject("too old")


def test_our_own_reasons_always_decode() -> None:
    for reason in ("é" * MAX_TEXT_BYTES, "x" * MAX_TEXT_BYTES + "é", "\ud800"):
        back = decode_from_worker(encode(m.Goodbye(reason)))
        assert len(back.reason.encode()) <= MAX_TEXT_BYTES
        assert encode(back) == encode(replace(back, reason=reason))


def test_a_forgotten_field_fails_at_import() -> None:
    with pytest.raises(LawBroken):
        check_complete(m.Beat, ["lease"])


def test_mutated_frames() -> None:
    """100,000 frames, or KILBURN_FRAMES of them."""
    count = int(os.environ.get("KILBURN_FRAMES", "100000"))
    seen = survey(count, seed=1)
    assert seen.total() == 2 * count
    assert seen["refused"] > count  # a frame is never sound for both sides but a Beat
    assert seen["StepPlan"] > 0  # and some mutants are still messages, so the changes are not all crude
    assert seen["StepResult"] > 0


# --- memory

# What decoding may hold at its peak, for each byte of a frame. A column of pairs comes to 34: 8 bytes become a tuple of
# two integers, with the flat columns still alive beside them.
MOST_PER_BYTE = 48
MOST_BESIDE = 64 << 10


def peak_bytes(frame: bytes) -> int:
    tracemalloc.clear_traces()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for decode in (decode_from_worker, decode_from_controller):
        with contextlib.suppress(ProtocolError):
            decode(frame)
    return tracemalloc.get_traced_memory()[1] - before


def hostile() -> dict[str, bytes]:
    plan, result = FROM_CONTROLLER["plan of decodes"], FROM_WORKER["result of decodes"]
    million = b"\x7f\x7f\x7f\x7f" * (1 << 18)
    nested = b"\xdd\x00\x0f\xff\xff" * 1000 + b"\x90" * (1 << 20)
    failures = msgpack.packb([[i, ""] for i in range(1 << 16)])
    admits = encode(FROM_CONTROLLER["plan"])
    return {
        "empty lists": b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
        "empty lists after a head": b"\x94\x01\x03\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
        "claims within claims": nested,
        "claims in an unknown field": b"\x95\x01\x03\x09\x05" + nested,
        "a column of rows": changed(plan, 4, million),
        "a column of pairs": changed(plan, 9, million),
        "a count of advances": changed(result, 4, 2**31 - 1),
        "tokens": changed(result, 6, million),
        "failures": changed(result, 7, msgpack.unpackb(failures)),
        "a claim of admits": admits[:60] + b"\xdd\x7f\xff\xff\xff" * 20,
        "texts": b"\xdc\x00\x40" + b"\xbf" + b"x" * (1 << 20),
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_memory_of_hostile_frames(name: str) -> None:
    frame = hostile()[name]
    tracemalloc.start()
    try:
        assert peak_bytes(frame) <= MOST_PER_BYTE * len(frame) + MOST_BESIDE
    finally:
        tracemalloc.stop()


def test_memory_of_mutated_frames() -> None:
    tracemalloc.start()
    try:
        for frame in mutants(5000, seed=2):
            assert peak_bytes(frame) <= MOST_PER_BYTE * len(frame) + MOST_BESIDE, frame.hex()
    finally:
        tracemalloc.stop()
