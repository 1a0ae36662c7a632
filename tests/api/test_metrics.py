"""GET /metrics: what it says is what is so, it says it in words that a person can read, and it never stops serving."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kilburn.controller.core.events import Beam
from kilburn.controller.core.lease import LeaseState
from kilburn.controller.core.snapshot import GroupSnapshot, Snapshot
from kilburn.controller.counts import Counts, Pace
from kilburn.controller.link import ControllerLink
from kilburn.controller.metrics import Metrics, Sources
from kilburn.controller.registry import RegistryCounters
from kilburn.controller.version import version
from kilburn.shared.types import FinishReason
from tests.api.world import World, served

COMPLETION = "/v1/completions"
BASE_UNITS = ("seconds", "bytes", "tokens", "ratio", "info", "total")
LIVE = (  # gauges of what is under way: zero where nothing is
    "kilburn_requests", "kilburn_requests_homeless", "kilburn_requests_running", "kilburn_requests_waiting",
    "kilburn_requests_swapped", "kilburn_waiting_tokens", "kilburn_sequences_running", "kilburn_flights",
    "kilburn_streams_open", "kilburn_outbox_characters", "kilburn_owned_slots", "kilburn_filled_slots",
    "kilburn_tail_slots", "kilburn_tail_waste_ratio", "kilburn_saved_blocks", "kilburn_blocks_of_which",
    "kilburn_sharing_ratio",
)  # fmt: skip
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(world: World) -> str:
    async with world.session.get(world.url + "/metrics") as response:
        text = await response.text()
        assert response.status == 200, text
        return text


async def samples(world: World) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(await scrape(world))
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over all series of a name that have these labels."""
    values = [v for (n, have), v in found.items() if n == name and labels.items() <= dict(have).items()]
    assert values, f"no {name} with {labels}"
    return sum(values)


async def of_one_moment(world: World) -> tuple[Samples, Snapshot]:
    """A scrape during which nothing happened, and the snapshot of then."""
    while True:
        before = world.driver.engine.snapshot()
        found = await samples(world)
        if world.driver.engine.snapshot() == before:
            return found, before


async def ask(world: World, **body: Any) -> Any:
    status, whole = await world.post(COMPLETION, {"prompt": "hello world", "max_tokens": 8} | body)
    assert status == 200, whole
    return whole


async def test_every_figure_has_a_name_in_base_units_words_and_few_labels(tmp_path: Path) -> None:
    async with served(tmp_path, settings={"vllm_metric_names": True}, worker={"num_host_blocks": 8}) as world:
        await ask(world)
        families = list(text_string_to_metric_families(await scrape(world)))
    assert len({family.name for family in families}) == len(families) > 80
    for family in families:
        assert re.fullmatch(r"kilburn_[a-z_]+|vllm:[a-z_0-9]+", family.name), family.name
        assert len(family.documentation.split()) >= 2 or family.name.startswith("vllm:"), family.name
        assert len(family.samples) < 100, f"{family.name} has labels without bounds"
        if family.type == "histogram":
            assert family.name.endswith(BASE_UNITS) or family.name.startswith(("kilburn_step_", "vllm:")), family.name
        assert not re.search(r"_(ms|millis|percent|kb|mb|milliseconds)(_|$)", family.name), family.name


async def test_what_it_says_is_what_the_snapshot_says(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.05, worker={"num_blocks": 24, "num_host_blocks": 8}) as world:
        answers = [asyncio.ensure_future(ask(world, prompt="hello world " * 4, max_tokens=30)) for _ in range(3)]
        await world.until(lambda: world.owned_blocks() > 3)
        found, told = await of_one_moment(world)
        (group,) = told.groups
        for state in ("free", "cached", "owned", "quarantined"):
            assert total(found, "kilburn_blocks", tier="device", state=state) == getattr(group, f"{state}_blocks")
            assert total(found, "kilburn_blocks", tier="host", state=state) == getattr(group, f"{state}_host_blocks")
        assert total(found, "kilburn_blocks", tier="device") == group.num_blocks == 24
        assert total(found, "kilburn_blocks", tier="host") == group.num_host_blocks == 8
        assert total(found, "kilburn_requests_running") == group.running_requests > 0
        assert total(found, "kilburn_filled_slots") == group.filled_slots > 0
        assert total(found, "kilburn_leases", state="ready") == 1
        assert total(found, "kilburn_leases") == sum(g.state is LeaseState.READY for g in told.groups)
        assert total(found, "kilburn_steps_total") == group.steps > 0
        assert total(found, "kilburn_step_rows_count") == group.steps
        await asyncio.gather(*answers)
        after = await samples(world)
        assert total(after, "kilburn_requests_finished_total", reason="length") == 3
        assert total(after, "kilburn_output_tokens_total") == 90 == total(after, "kilburn_step_generated_tokens_total")
        assert total(after, "kilburn_prefix_hit_tokens_total") == the_group(world).prefix_hit_tokens
        for name in ("first_token", "request", "request_queue", "request_prefill", "request_decode"):
            assert total(after, f"kilburn_{name}_seconds_count") == 3
        assert total(after, "kilburn_inter_token_seconds_count") == 3 * 29
        parts = sum(total(after, f"kilburn_request_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
        assert parts == pytest.approx(total(after, "kilburn_request_seconds_sum"))


async def test_it_says_what_runs_here_and_by_which_settings(tmp_path: Path) -> None:
    settings = {"preemption": "swap", "drain_seconds": 2.5, "progress_seconds": 7.0, "max_waiting": 33}
    async with served(tmp_path, settings=settings) as world:
        found = await samples(world)
    (build,) = [dict(labels) for name, labels in found if name == "kilburn_build_info"]
    assert build["version"] == version()
    assert build["model"] == "toy"
    told = {dict(labels)["setting"]: dict(labels)["value"] for name, labels in found if name == "kilburn_config_info"}
    wanted = {"preemption": "swap", "drain_seconds": "2.5", "progress_seconds": "7", "max_waiting": "33"}
    assert wanted.items() <= told.items()


async def test_what_drained_is_as_of_the_scrape_and_not_of_the_last_turn(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        await ask(world)
        loop = asyncio.get_running_loop()
        sources = Sources(
            now=lambda: loop.time() + 1000.0,
            snapshot=world.driver.engine.snapshot,
            is_serving=lambda snapshot: True,
            plan_s=lambda: 0.0,
            streams=world.driver.streams,
            link=ControllerLink("tcp://127.0.0.1:0", lambda events: None),
            registry=RegistryCounters(),
            about=(),
        )
        assert world.driver.engine.snapshot().drained_requests_per_s > 0
        text = Metrics(sources).text().decode()
        assert "\nkilburn_drained_requests_per_second 0.0\n" in text
        assert "\nkilburn_drained_tokens_per_second 0.0\n" in text


def the_group(world: World) -> GroupSnapshot:
    (group,) = world.driver.engine.snapshot().groups
    return group


async def test_gauges_fall_to_zero_after_aborts_without_new_traffic(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01, worker={"num_blocks": 24, "max_rows": 4}) as world:
        body = {"prompt": "hello world " * 4, "max_tokens": 150, "stream": True}
        sessions = [asyncio.ensure_future(hang_up(world, body | {"n": 1 + i % 2})) for i in range(6)]
        await world.until(lambda: the_group(world).running_requests > 1 and the_group(world).waiting_requests > 1)
        during = await samples(world)
        assert total(during, "kilburn_requests") == total(during, "kilburn_streams_open") == 6
        assert total(during, "kilburn_owned_slots") > 0
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        await world.until(lambda: world.is_quiet() and the_group(world).flights == 0)
        after = await samples(world)
        for name in LIVE:
            assert total(after, name) == 0, name
        for state in ("owned", "quarantined"):
            assert total(after, "kilburn_blocks", state=state) == 0
        assert total(after, "kilburn_requests_finished_total", reason="cancelled") == 6


async def hang_up(world: World, body: dict[str, Any]) -> None:
    """A stream that is read until somebody cancels this."""
    async with world.session.post(world.url + COMPLETION, json=body) as response:
        await response.read()


async def test_refusals_are_counted_by_what_the_client_was_told(tmp_path: Path) -> None:
    async with served(tmp_path, worker={"max_rows": 2}) as world:
        told = []
        for body in (
            {"prompt": "x", "max_tokens": 1000},
            {"prompt": "x", "n": 5},
            {"prompt": "x", "temperature": -1},
            {"prompt": "x", "model": "another"},
            {"prompt": ""},
        ):
            status, whole = await world.post(COMPLETION, body)
            assert status in (400, 404)
            told.append(whole["error"]["code"] or "invalid_request")
        found = await samples(world)
        for code in set(told):
            assert total(found, "kilburn_requests_refused_total", reason=code) == told.count(code)
        assert total(found, "kilburn_requests_refused_total") == len(told)
        assert total(found, "kilburn_requests_refused_total", reason="queue_full") == 0, "known, and did not happen"
        assert total(found, "kilburn_requests_finished_total") == 0


async def test_a_fault_in_the_figures_is_logged_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as world:
        engine = world.driver.engine
        kept, engine._leases_ended = engine._leases_ended, None  # type: ignore[assignment]  # a bug of our own
        answer = asyncio.ensure_future(ask(world, max_tokens=40))
        with caplog.at_level(logging.ERROR):
            async with world.session.get(world.url + "/metrics") as response:
                assert response.status == 500
        assert "Traceback" in caplog.text
        await ask(world)
        assert len((await answer)["choices"][0]["text"]) > 0
        engine._leases_ended = kept
        assert total(await samples(world), "kilburn_requests_finished_total", reason="length") == 2


async def test_counters_never_fall_while_requests_are_preempted_and_hit_what_they_left(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.002, worker={"num_blocks": 20, "num_host_blocks": 8}) as world:
        prompts = ["hello world " * 3 + str(i % 2) for i in range(6)]
        answers = [asyncio.ensure_future(ask(world, prompt=prompt, max_tokens=90)) for prompt in prompts]
        before = await samples(world)
        while not all(answer.done() for answer in answers):
            after = await samples(world)
            falling = {
                key for key, value in before.items()
                if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and after[key] < value
            }  # fmt: skip
            assert not falling
            before = after
            await asyncio.sleep(0.01)
        group, found = the_group(world), await samples(world)
        assert group.preempted_by_recompute + group.preempted_by_swap > 0
        assert group.chosen_by_cost > 0
        assert group.compared_swap_s > 0, "this worker computes in no time, but has a guess of what moves take"
        for mode, seconds in (("swap", group.compared_swap_s), ("recompute", group.compared_recompute_s)):
            assert total(found, "kilburn_preemption_predicted_seconds_total", mode=mode) == pytest.approx(seconds)
        assert group.prefix_hit_tokens > sum(len(p) for p in prompts) / 100, "what was preempted was hit"


async def test_the_names_that_dashboards_for_vllm_know_are_there_when_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        await ask(world)
        assert "vllm:" not in await scrape(world)
    async with served(tmp_path, settings={"vllm_metric_names": True}) as world:
        await ask(world, n=2)
        found = await samples(world)
    by_name = {name: dict(labels) for name, labels in found}
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc",
                 "gpu_cache_usage_perc", "cpu_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
                 "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket",
                 "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
                 "request_success_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
                 "request_decode_time_seconds_sum", "request_inference_time_seconds_count",
                 "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
                 "request_max_num_generation_tokens_sum", "request_params_n_sum", "request_params_max_tokens_sum",
                 "iteration_tokens_total_bucket", "num_preemptions_total", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "cache_config_info"):  # fmt: skip
        assert by_name[f"vllm:{name}"]["model_name"] == "toy", name
    assert total(found, "vllm:generation_tokens_total") == total(found, "kilburn_output_tokens_total") == 16
    assert total(found, "vllm:request_success_total", finished_reason="length") == 1
    assert total(found, "vllm:request_params_n_sum") == 2
    assert total(found, "vllm:request_max_num_generation_tokens_sum") == 8


def observed(counts: Counts) -> dict[str, tuple[int, float]]:
    names = ("queue_s", "prefill_s", "first_token_s", "inter_token_s", "decode_s", "inference_s", "end_to_end_s")
    return {name: (getattr(counts, name).spread().count, getattr(counts, name).spread().total) for name in names}


def test_the_pace_of_one_request_by_hand() -> None:
    counts = Counts()
    pace = Pace(counts, num_sequences=2, max_tokens=9, now=10.0)
    pace.started(num_prompt=5, num_cached=4, now=12.0)
    pace.token(0, now=13.0)
    pace.token(1, now=13.0)  # of the same step: not a second first token
    pace.token(0, now=13.5)
    pace.token(1, now=17.5)  # it was preempted
    pace.ended(FinishReason.STOP, now=17.5)
    assert observed(counts) == {
        "queue_s": (1, 2.0), "prefill_s": (1, 1.0), "first_token_s": (1, 3.0), "inter_token_s": (2, 5.0),
        "decode_s": (1, 4.5), "inference_s": (1, 5.5), "end_to_end_s": (1, 7.5),
    }  # fmt: skip
    assert (counts.prompt_tokens, counts.cached_tokens, counts.output_tokens) == (5, 4, 4)


def test_a_request_that_fails_or_comes_at_once_has_no_pace_that_it_did_not_have() -> None:
    counts = Counts()
    failed, beams = Pace(counts, 1, 9, now=0.0), Pace(counts, 2, 9, now=0.0)
    failed.started(5, 0, now=1.0)
    failed.token(0, now=2.0)
    failed.ended(FinishReason.ERROR, now=3.0)
    beams.started(5, 0, now=1.0)
    beam = Beam(1, 0, (1, 2, 3), 0.0, 0.0, FinishReason.LENGTH)
    beams.whole(0, len(beam.tokens), now=4.0)
    beams.whole(1, len(beam.tokens), now=4.0)
    beams.ended(FinishReason.LENGTH, now=4.0)
    assert counts.end_to_end_s.spread().count == counts.decode_s.spread().count == 1
    assert counts.inter_token_s.spread().count == 0
    assert counts.finished == {
        **dict.fromkeys(FinishReason, 0), FinishReason.LENGTH: 1, FinishReason.ERROR: 1
    }  # fmt: skip
    assert counts.longest_lengths.spread().total == 3


def test_a_hit_longer_than_the_prompt_is_no_negative_number() -> None:
    """A prompt and what was generated may be found together when a preempted request comes back."""
    counts = Counts()
    Pace(counts, 1, 9, now=0.0).started(num_prompt=5, num_cached=50, now=0.0)
    assert (counts.prompt_tokens, counts.cached_tokens) == (5, 50)
    assert counts.queue_s.spread().count == 1
