"""`kilburn serve` with real processes and a tiny model: asked, left, killed, stopped."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import AsyncOpenAI

from tests.system.serving import TINY_FLAGS, Service, children_of, is_alive
from tests.worker.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
# Starts a command, says its process id, and waits to be killed.
ORPHANS = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""
PROMPTS = [f"The {word} of the" for word in ("sea", "hand", "state", "moon", "thing", "reason", "bread", "edge")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return make_tiny(folder, "llama", overrides={"max_position_embeddings": 2048})


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(str(tiny), tmp_path_factory.mktemp("serve"), *TINY_FLAGS) as running:
        yield running


def test_controller_and_worker_are_two_processes_and_the_controller_maps_no_torch(service: Service) -> None:
    (worker,) = service.children()
    assert len({service.process.pid, worker, os.getpid()}) == 3
    assert f"pid {worker}" in service.log
    assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()


def test_it_prints_phases_with_their_times_and_answers_health(service: Service) -> None:
    for phase in ("model ", "controller ", "worker "):
        assert any(line.strip().startswith(phase) and line.endswith(" s") for line in service.log.splitlines())
    assert service.health() == 200


def test_the_openai_client_is_served_blocking_and_streaming(service: Service) -> None:
    client = service.client()
    asked = {"model": service.model, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True) if c.choices]
    assert "".join(pieces) == whole.choices[0].text
    chat = client.chat.completions.create(
        model=service.model, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    assert chat.choices[0].finish_reason in ("stop", "length")


def test_64_at_once_answer_as_one_by_one(service: Service) -> None:
    async def ask(client: AsyncOpenAI, prompt: str) -> str:
        done = await client.completions.create(
            model=service.model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        return done.choices[0].text

    async def play() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{service.address}/v1", api_key="none", timeout=120) as client:
            alone = [await ask(client, prompt) for prompt in PROMPTS]
            return alone, list(await asyncio.gather(*(ask(client, PROMPTS[i % 8]) for i in range(64))))

    alone, together = asyncio.run(play())
    assert together == alone * 8


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_long_before_its_answer_would_end(service: Service, stream: bool) -> None:
    """How many steps that takes at most, tests/api/test_leaving.py counts."""
    num_tokens = 1900
    body = {"model": service.model, "prompt": PROMPTS[1], "max_tokens": num_tokens, "ignore_eos": True}
    service.wait_for(lambda: service.owned_blocks() == 0, 60)
    before = service.figure("kilburn_output_tokens_total")
    asking = HTTPConnection(service.address.removeprefix("http://"), timeout=60)
    asking.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}))
    with asking.getresponse() if stream else nullcontext() as response:
        if response is not None:
            assert b'"choices"' in response.readline()
        service.wait_for(lambda: service.owned_blocks() > 0, 60)
        asking.close()
    service.wait_for(lambda: service.owned_blocks() == 0, 60)
    assert service.figure("kilburn_output_tokens_total") - before < num_tokens / 2


def test_a_port_in_use_is_a_fault_of_port(service: Service, tiny: Path, tmp_path: Path) -> None:
    port = service.address.rpartition(":")[2]
    second = Service(str(tiny), tmp_path, *TINY_FLAGS, f"--port={port}")
    second.start()
    assert second.process.wait(120) == 2
    assert "--port" in second.log
    assert "in use" in second.log
    assert "Traceback" not in second.log


def test_the_load_generator_measures_it(service: Service, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.5,20,4\n" * 5)
    common = ["--url", service.address, "--requests", "5", "--json", str(tmp_path / "out.json")]
    for words in (
        ["--concurrency", "2", "--prompt-tokens", "4:40", "--output-tokens", "4", "--profile"],
        ["--rate", "50", "--prompt-tokens", "9", "--output-tokens", "4"],
        ["--trace", str(trace)],
    ):
        done = subprocess.run(
            [sys.executable, "bench/serve.py", *common, "--vocabulary", "300", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        made = json.loads((tmp_path / "out.json").read_text())
        assert (made["failed"], made["output_tokens"]) == (0, 20)
        assert 0 < made["ttft_s"]["p50"] <= made["ttft_s"]["p99"] <= made["wall_s"]
        assert ("--profile" in words) == (0 < made.get("worker_idle_share", 0) < 1)


def stream_all(service: Service, texts: dict[str, str], counts: dict[str, int]) -> None:
    """Every prompt as a greedy stream in a thread of its own; `counts` grows while they run."""

    def one(prompt: str) -> None:
        stream = service.client().completions.create(
            model=service.model, prompt=prompt, max_tokens=200, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = ""
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].text
                counts[prompt] = counts.get(prompt, 0) + 1
        texts[prompt] = text

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def test_streams_survive_the_death_of_the_worker(service: Service) -> None:
    undisturbed: dict[str, str] = {}
    stream_all(service, undisturbed, {})
    assert all(len(undisturbed[prompt]) > 100 for prompt in PROMPTS)

    texts: dict[str, str] = {}
    counts: dict[str, int] = {}
    (worker,) = service.children()
    streaming = threading.Thread(target=stream_all, args=(service, texts, counts))
    streaming.start()
    service.wait_for(lambda: len(counts) == 8 and min(counts.values()) > 5, 120)
    os.kill(worker, signal.SIGKILL)
    killed_at = dict(counts)
    service.wait_for(lambda: service.health() == 503, 30)
    streaming.join(120)
    assert not streaming.is_alive()
    assert texts == undisturbed
    assert sum(killed_at.values()) < sum(counts.values()), "the worker died too late to disturb anything"
    assert service.health() == 200
    assert service.children() != [worker]
    assert f"worker (pid {worker}) was killed by SIGKILL" in service.log


def groups_of(service: Service) -> dict[str, dict[str, Any]]:
    rows = httpx.get(f"{service.address}/admin/groups", timeout=60).json()["data"]
    return {row["name"]: row for row in rows}


def streams_over_both(service: Service) -> tuple[threading.Thread, dict[str, str]]:
    """Streams under way on two groups, and where their texts will be."""
    texts: dict[str, str] = {}
    streaming = threading.Thread(target=stream_all, args=(service, texts, {}))
    streaming.start()
    service.wait_for(lambda: [bool(row["running_requests"]) for row in groups_of(service).values()] == [True, True], 60)
    return streaming, texts


def test_two_groups_share_the_streams_and_lose_none_when_one_is_killed_or_leaves(tiny: Path, tmp_path: Path) -> None:
    with Service(str(tiny), tmp_path, *TINY_FLAGS, "--groups=2") as service:
        service.wait_for(lambda: len(groups_of(service)) == 2, 60)
        streaming, undisturbed = streams_over_both(service)
        streaming.join(120)
        first, second = groups_of(service)
        # Killed: its streams go on, and another takes its place.
        killed = service.children()[0]
        streaming, texts = streams_over_both(service)
        os.kill(killed, signal.SIGKILL)
        streaming.join(120)
        assert texts == undisturbed
        service.wait_for(lambda: set(groups_of(service)) == {first, second}, 60)
        assert killed not in service.children()
        # Told to leave: its streams go on with the other, it ends well, and nobody takes its place.
        streaming, texts = streams_over_both(service)
        assert httpx.post(f"{service.address}/admin/groups/{first}/drain", timeout=60).status_code == 202
        streaming.join(120)
        assert texts == undisturbed
        service.wait_for(lambda: len(service.children()) == 1, 60)
        assert set(groups_of(service)) == {second}
        assert service.health() == 200


def test_serve_leaves_with_its_parent_where_asked_to(tiny: Path, tmp_path: Path) -> None:
    """Whoever kills a test run, or a shell, finds no server left behind."""
    service = Service(str(tiny), tmp_path, *TINY_FLAGS)
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, *service.command], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    serve = int(parent.stdout.readline())
    service.wait_for(lambda: children_of(serve), 90)  # the worker: by then it knows its parent
    parent.kill()
    parent.wait(10)
    service.wait_for(lambda: not is_alive(serve), 90)


def test_ctrl_c_lets_answers_finish_and_a_killed_serve_leaves_no_worker(tiny: Path, tmp_path: Path) -> None:
    """Two services at once, since starting one takes its time."""
    (tmp_path / "killed").mkdir()
    told, killed = Service(str(tiny), tmp_path, *TINY_FLAGS), Service(str(tiny), tmp_path / "killed", *TINY_FLAGS)
    told.start()
    with killed:
        (worker,) = killed.children()
        killed.process.kill()
        killed.process.wait(10)
        killed.wait_for(lambda: not is_alive(worker), 60)

    told.wait_until_ready()
    (worker,) = told.children()
    stream = told.client().completions.create(
        model=told.model, prompt=PROMPTS[0], max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream)]
    told.process.send_signal(signal.SIGINT)
    chunks += list(stream)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length", "the answer was cut short"
    assert told.process.wait(60) == 0
    assert not is_alive(worker)
    assert "Traceback" not in told.log
    assert "starting another" not in told.log


def test_a_pool_that_cannot_be_had_ends_serve_with_the_setting_to_change(tiny: Path, tmp_path: Path) -> None:
    running = Service(str(tiny), tmp_path, "--device=cpu", "--kv-memory=900TiB")
    running.start()
    assert running.process.wait(120) == 1
    assert "--kv-memory" in running.log
    assert running.log.count("--kv-memory") == 1, "tried again although nothing can have changed"


def test_answers_of_a_real_worker_follow_their_grammar(service: Service) -> None:
    """Drawn at random by a model of random weights: only the masks make sense of it."""
    client = service.client()
    about = {"model": service.model, "max_tokens": 200, "temperature": 1.5, "seed": 3}
    picked = client.completions.create(prompt="x", n=4, extra_body={"guided_choice": ["yes", "no"]}, **about)
    assert {choice.text for choice in picked.choices} <= {"yes", "no"}
    assert {choice.finish_reason for choice in picked.choices} == {"stop"}
    code = client.completions.create(
        prompt="x", extra_body={"structured_outputs": {"regex": "[A-F]{3}-[0-9]+7"}}, **about
    )
    assert re.match("[A-F]{3}-[0-9]", code.choices[0].text)
    flag = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
        "required": ["on", "of"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "flag", "schema": flag | {"additionalProperties": False}}}
    said = client.chat.completions.create(messages=[{"role": "user", "content": "?"}], response_format=wanted, **about)
    read = json.loads(said.choices[0].message.content)
    assert (type(read["on"]), read["of"] in ("a", "b"), said.choices[0].finish_reason) == (bool, True, "stop")
