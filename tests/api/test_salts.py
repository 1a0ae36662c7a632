"""Whose blocks may serve whom: tenants apart, public prefixes shared, salts that clients cannot choose."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.salts import KeyFileFault, Salts, keyed, read_server_key
from tests.api.world import World, served

PROMPT = "the quick brown fox jumps over the lazy dog, " * 6
ALICE, BOB, ROOT = "alice-secret", "bob-secret-x", "root-secret-x"


def with_keys(folder: Path) -> dict[str, Any]:
    file = folder / "keys"
    file.write_text(f"alice:{ALICE}\nbob:{BOB}\nroot:{ROOT}:admin\n")
    return {"api_key_file": str(file)}


async def cached(world: World, key: str = "", named: str = "", **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"X-Request-Id": named} if named else {}
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    status, whole = await world.post("/v1/completions", body, headers=headers)
    assert status == 200, whole
    found: int = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_a_tenant_finds_its_own_blocks_and_never_those_of_another(tmp_path: Path) -> None:
    async with served(tmp_path, settings=with_keys(tmp_path)) as world:
        assert await cached(world, ALICE) == 0
        assert await cached(world, ALICE) > 0
        assert await cached(world, BOB) == 0
        assert await cached(world, BOB) > 0
        assert await cached(world, ROOT) == 0


async def test_a_prompt_of_somebody_elses_takes_the_steps_of_one_that_nobody_sent(tmp_path: Path) -> None:
    """What a tenant could measure is what is computed for it: of a miss all, whoever sent the same before."""
    async with served(tmp_path, settings=with_keys(tmp_path)) as world:

        async def computed(key: str, name: str) -> list[str]:
            await cached(world, key, name)
            headers = {"Authorization": f"Bearer {ROOT}"}
            async with world.session.get(f"{world.url}/debug/requests/{name}", headers=headers) as response:
                (story,) = (await response.json())["requests"]
            return [turn["text"].partition(" of ")[0] for turn in story["turns"] if turn["turn"] == "chunk"]

        miss, hit, others = await computed(ALICE, "miss"), await computed(ALICE, "hit"), await computed(BOB, "others")
        assert others == miss
        assert hit != miss


async def test_a_cache_salt_narrows_and_joins_nobody(tmp_path: Path) -> None:
    async with served(tmp_path, settings=with_keys(tmp_path)) as world:
        assert await cached(world, ALICE, cache_salt="one") == 0
        assert await cached(world, ALICE, cache_salt="one") > 0
        assert await cached(world, ALICE, cache_salt="two") == 0
        assert await cached(world, ALICE) == 0
        assert await cached(world, BOB, cache_salt="one") == 0


async def test_somebody_without_a_key_is_a_tenant_too(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        assert await cached(world) == 0
        assert await cached(world) > 0
        assert await cached(world, cache_salt="x") == 0


def test_salts_tell_every_two_inputs_apart() -> None:
    salts = Salts(b"k" * 32)
    names, narrows = ["a", "ab", "a|b", "a\0", "default"], ["", "a", "b", "|c", "b|c", "a\0b"]
    found = {salts.of(name, narrow) for name, narrow in product(names, narrows)}
    assert len(found) == len(names) * len(narrows)
    assert all(len(salt) == 32 for salt in found)
    assert salts.of("alice") == Salts(b"k" * 32).of("alice")  # equal in every process with this key
    assert not found & {Salts(b"K" * 32).of(name, narrow) for name, narrow in product(names, narrows)}
    assert salts.service_key() not in found


def test_parts_are_told_apart_by_their_lengths() -> None:
    parts = [(b"a", b"bc"), (b"ab", b"c"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"a", b"b", b"c")]
    assert len({keyed(b"key", b"use", *each) for each in parts}) == len(parts)
    assert keyed(b"key", b"usea", b"b") != keyed(b"key", b"use", b"ab")


def test_a_key_file_is_read_or_named(tmp_path: Path) -> None:
    assert read_server_key("") != read_server_key("")  # drawn anew
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    assert read_server_key(str(file)) == b"0123456789abcdef"
    for content, complaint in ((b"short", "at least 16"), (b"x" * 5000, "larger than")):
        file.write_bytes(content)
        with pytest.raises(KeyFileFault, match=complaint):
            read_server_key(str(file))
    with pytest.raises(KeyFileFault, match="cannot be read"):
        read_server_key(str(tmp_path / "none"))
