"""`kilburn top`, the program itself, against a real controller: as text, in a terminal, and where it may not look."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from kilburn.controller.top import pool_lines, read_key, state_of
from kilburn.shared.keys import SettingError
from tests.api.world import served
from tests.page.test_page import busy

COMMAND = (sys.executable, "-m", "kilburn.controller.cli", "top")
QUIET = {name: value for name, value in os.environ.items() if not name.startswith("KILBURN_")}
ROOT_KEY = "sk-root-00002"


async def top(*words: str) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=pipe, stderr=pipe, env=QUIET)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_once_prints_what_the_engine_says_and_no_colours(tmp_path: Path) -> None:
    worker = {"num_blocks": 300, "num_host_blocks": 40, "max_len": 2048}
    async with served(tmp_path, delay_s=0.05, worker=worker) as world:
        async with busy(world, {"prompt": "hello world", "n": 2, "max_tokens": 900}):
            status, out, err = await top("--once", "--url", world.url)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        lines = out.splitlines()
        assert lines[0].split() == ["toy", "ready"]
        assert re.search(r"\d+ tokens/s, \d+ prompt tokens/s; 1 running, 0 waiting;", lines[1])
        assert re.search(r"fake  ready  lease 1, heard \d\.\d s ago, \d+ beats, \d+ steps; preempted 0 by swap", out)
        assert "device, 300 blocks of 16 tokens" in out
        assert "host, 40 blocks of 16 tokens" in out
        (row,) = [line.split() for line in lines if line.startswith("1 ")]
        assert row[:2] == ["1", "running"]
        assert int(row[3]) > 0
        counted = re.search(r"free (\d+) +░ cached (\d+) +▒ owned (\d+)", out)
        assert counted is not None
        assert 250 < int(counted[1]) < 300
        assert int(counted[3]) > 0
        assert re.search(r"s ago +lease began: lease 1: fake, 300 blocks", out)
        status, out, _ = await top("--url", world.url)  # no terminal: once, as well
        assert (status, "no requests" in out) == (0, True)


async def test_in_a_terminal_it_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.05, worker={"max_len": 2048}) as world:
        ours, theirs = os.openpty()
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            world.url,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=QUIET | {"TERM": "xterm", "LINES": "50"},
        )
        os.close(theirs)
        seen, loop = bytearray(), asyncio.get_running_loop()
        loop.add_reader(ours, lambda: seen.extend(os.read(ours, 65536)))
        try:
            async with busy(world, {"prompt": "hello world", "max_tokens": 1200}):
                await world.until(lambda: b"running" in seen and b"generated" in seen, 60)
            await world.until(lambda: b"no requests" in seen, 60)
            assert b"\x1b[" in seen
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                assert await process.wait() == 130
        finally:
            loop.remove_reader(ours)
            os.close(ours)
        await world.until(lambda: world.feed.num_viewers == 0)


async def test_what_cannot_be_shown_is_said_in_words(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", tmp_path / "key"
    keys.write_text(f"alice:sk-alice-0001\nroot:{ROOT_KEY}:admin\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        status, _, err = await top("--once", "--url", world.url)
        assert (status, "give --key-file" in err) == (1, True)
        key.write_text("sk-alice-0001\n")
        status, _, err = await top("--once", "--url", world.url, "--key-file", str(key))
        assert (status, "the key of an admin" in err, "alice" in err) == (1, True, False)
        key.write_text(ROOT_KEY)
        status, out, _ = await top("--once", "--url", world.url, "--key-file", str(key))
        assert (status, out.startswith("toy")) == (0, True)
        status, _, err = await top("--once", "--url", world.url + "/v1")
        assert status == 1
    status, _, err = await top("--once", "--url", world.url)
    assert (status, "cannot be read" in err, "Traceback" in err) == (1, True, False)
    status, _, err = await top("--url", "localhost:8000")
    assert (status, "--url" in err) == (2, True)


def test_a_key_file_holds_one_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\ntwo\n")
    with pytest.raises(SettingError, match="one API key"):
        read_key(str(file))
    with pytest.raises(SettingError, match="cannot be read"):
        read_key(str(file) + "x")


def test_a_large_pool_is_drawn_with_what_most_of_a_few_blocks_are() -> None:
    assert [state_of(cell) for cell in (0, 1, 2, 60, 61, 62, 65)] == [
        "free", "owned", "shared", "shared", "cached", "quarantined", "pinned",
    ]  # fmt: skip
    lines = [line.plain for line in pool_lines(bytes([1] * 100_000 + [0] * 100_000), 100)]
    assert lines[:8] == ["▒" * 100] * 4 + ["·" * 100] * 4
    assert lines[8].startswith("one character is 250 blocks")
    assert [line.plain for line in pool_lines(bytes([0, 1, 3, 61, 62, 65]), 4)] == ["·▒▓░", "X█"]
    assert pool_lines(b"", 10) == []
