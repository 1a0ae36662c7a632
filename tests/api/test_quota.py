"""What a key may use: counted by hand on a clock, and met over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.auth import KeyFault, read_keys
from kilburn.controller.quota import Allowance, Exceeded, Meter
from tests.api.world import World, served

COMPLETION = "/v1/completions"
ALICE, BOB, CAROL = "sk-alice-0001", "sk-bob-000001", "sk-carol-0001"


def test_requests_per_minute_come_back_one_by_one() -> None:
    meter = Meter(Allowance(requests_per_minute=3), now=100.0)
    for now in (100.0, 100.0, 101.0):
        assert meter.exceeded(now) is None
        meter.begin()
        meter.end()
    refused = meter.exceeded(101.0)
    assert refused == Exceeded("rpm=3", pytest.approx(19.0)), "one flows in each twenty seconds, and one second is over"
    assert meter.exceeded(119.9) is not None
    assert meter.exceeded(120.1) is None
    meter.begin()
    assert meter.exceeded(120.2) is not None
    assert meter.exceeded(10_000.0) is None
    for _ in range(3):
        meter.begin()
    assert meter.exceeded(10_000.0) is not None, "a long rest saves up no more than a minute's worth"


def test_tokens_are_owed_when_an_answer_was_longer_than_what_was_left() -> None:
    meter = Meter(Allowance(tokens_per_minute=60), now=0.0)
    assert meter.exceeded(0.0) is None
    meter.charge(50)
    assert meter.exceeded(0.0) is None, "ten are left, and nobody knows how long an answer gets"
    meter.charge(40)
    assert meter.exceeded(0.0) == Exceeded("tpm=60", pytest.approx(31.0))
    assert meter.exceeded(30.5) is not None
    assert meter.exceeded(31.5) is None


def test_as_many_at_once() -> None:
    meter = Meter(Allowance(at_once=2), now=0.0)
    meter.begin()
    assert meter.exceeded(0.0) is None
    meter.begin()
    assert meter.exceeded(1e9) == Exceeded("at-once=2", 1.0), "no time helps; an end does"
    meter.end()
    assert meter.exceeded(0.0) is None


def test_allowances_in_the_file_of_keys() -> None:
    ring = read_keys("", f"alice:{ALICE}:rpm=60:tpm=90000:at-once=4,bob:{BOB}:admin:weight=2:rpm=5,carol:{CAROL}")
    alice, bob, carol = (ring.tenant_of(key) for key in (ALICE, BOB, CAROL))
    assert alice is not None
    assert bob is not None
    assert carol is not None
    assert alice.allowance == Allowance(4, 60, 90000)
    assert (bob.allowance, bob.weight, bob.is_admin) == (Allowance(requests_per_minute=5), 2.0, True)
    assert carol.allowance.is_any
    assert len({alice.key_id, bob.key_id, carol.key_id}) == 3
    for wrong in ("rpm=0", "rpm=-1", "rpm=1.5", "tpm=many", "at-once=", "rps=5"):
        with pytest.raises(KeyFault, match=r"entry 1: .*(a whole number above 0|after a key may come)"):
            read_keys("", f"alice:{ALICE}:{wrong}")


async def ask(world: World, key: str, **more: Any) -> tuple[int, dict[str, Any], str]:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "x", "max_tokens": 2, **more}
    async with world.session.post(world.url + COMPLETION, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("Retry-After", "")


async def test_a_key_that_used_what_it_may_is_told_when_to_come_back_and_others_go_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team:{ALICE}:rpm=2\nteam:{BOB}:tpm=20\nteam:{CAROL}\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        assert [(await ask(world, ALICE))[0] for _ in range(2)] == [200, 200]
        status, told, after = await ask(world, ALICE)
        assert (status, told["error"]["type"], told["error"]["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert "rpm=2" in told["error"]["message"]
        assert 1 <= int(after) <= 30
        headers = {"x-api-key": ALICE}
        status, told = await world.post("/v1/messages", {"messages": [], "max_tokens": 1}, headers=headers)
        assert (status, told["error"]["type"]) == (429, "rate_limit_error"), "whatever it asks for, before it is read"
        async with world.session.get(world.url + "/v1/models", headers=headers) as response:
            assert response.status == 200, "looking costs nothing"
        assert (await ask(world, BOB, max_tokens=30))[0] == 200, "the bucket was not empty"
        assert (await ask(world, BOB))[0] == 429
        assert [(await ask(world, CAROL))[0] for _ in range(5)] == [200] * 5


async def test_so_many_at_once_and_those_that_leave_make_room(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team:{ALICE}:at-once=1\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}, delay_s=0.01) as world:
        headers, long = {"Authorization": f"Bearer {ALICE}"}, {"prompt": "x", "max_tokens": 200, "stream": True}
        stream = await world.session.post(world.url + COMPLETION, json=long, headers=headers)
        assert (await ask(world, ALICE))[0] == 429
        stream.close()
        async with asyncio.timeout(60):
            while (await ask(world, ALICE))[0] != 200:
                await asyncio.sleep(0.01)
        assert (await ask(world, ALICE))[0] == 200
