"""Every panel and every alert, tried on a real Prometheus that watched a real controller under a load.

A panel's expression must return data that changed during the load; the few that rightly do not change are named here,
with the reason. Once all is quiet, what Prometheus has must be what the engine itself says.
"""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kilburn.shared.layout import KVLayout
from tests.system.panel_load import ROOT, Fickle, Load, Watched
from tests.system.prometheus_server import RATE_INTERVAL, SETTINGS, PrometheusServer, binary
from tests.system.redis_server import RedisServer
from tests.worker.tiny_models import OWN_CONFIGS, make_tiny

DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
NUM_BLOCKS, NUM_HOST_BLOCKS = 72, 120
# Panels whose expressions rightly stay as they are while a controller runs.
CONSTANT = {
    "Memory of workers": "pools and weights are allocated once, when a worker starts",
    "No controller": "one is there all the time, so that no request goes without",
    "What runs here": "versions and settings are fixed when a process starts",
}
RULES = [rule for group in yaml.safe_load((SETTINGS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def boards() -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in DASHBOARDS]


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [(board["uid"], panel) for board in boards() for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str, str]]:
    """(dashboard, panel, expression as Grafana would send it)."""
    chosen = {"$__rate_interval": RATE_INTERVAL, "$instance": ".*", "$group": ".*"}
    found = []
    for uid, panel in panels():
        for target in panel["targets"]:
            promql = target["expr"]
            for name, value in chosen.items():
                promql = promql.replace(name, value)
            assert "$" not in promql, promql
            found.append((uid, panel["title"], promql))
    return found


# --- the files


def test_dashboards_are_what_their_descriptions_say() -> None:
    wanted = subprocess.run(
        [sys.executable, "-c", "from grafana.write import texts; import json; print(json.dumps(texts()))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {file.name: file.read_text() for file in DASHBOARDS} == json.loads(wanted.stdout), "python grafana/write.py"


def lost(sent: Any, kept: Any, where: str = "") -> Iterator[str]:
    """What of a value did not come through another's hands."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            yield from lost(value, kept[key], f"{where}.{key}") if key in kept else [f"{where}.{key} is unknown"]
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for at, (one, other) in enumerate(zip(sent, kept, strict=True)):
            yield from lost(one, other, f"{where}[{at}]")
    elif type(sent) is not type(kept) or sent != kept:
        yield f"{where}: {sent!r} became {kept!r}"


def through_the_library(board: dict[str, Any]) -> list[str]:
    """What Grafana's own library does not know of a dashboard: keys, or values of another type."""
    register_default_plugins()
    return list(lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: str(file.stem))
def test_grafanas_own_library_knows_every_key_of_a_dashboard(file: Path) -> None:
    board = json.loads(file.read_text())
    assert through_the_library(board) == []
    board["panels"][1]["fieldconfig"] = board["panels"][1].pop("fieldConfig")
    board["panels"][1]["gridPos"]["width"] = 4
    complaints = through_the_library(board)
    assert any("fieldconfig is unknown" in line for line in complaints)
    assert any("width is unknown" in line for line in complaints)


def test_panels_can_be_read_and_lie_beside_each_other() -> None:
    assert len({board["uid"] for board in boards()}) == len(boards()) == 6
    for uid, panel in panels():
        where = f"{uid}, {panel['title']}"
        assert len(panel["description"].split()) >= 6, where
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert panel["title"][0].isupper(), where
        assert panel["targets"], where
    for board in boards():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, f"{panel['title']} lies on another"
            assert at["x"] + at["w"] <= 24
            taken |= cells


def test_promtool_takes_settings_and_rules() -> None:
    for words in (
        ["check", "config", str(SETTINGS / "prometheus.yml")],
        ["check", "rules", str(SETTINGS / "alerts.yml")],
    ):
        done = subprocess.run([binary("promtool"), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_has_its_section_in_the_operators_guide(rule: dict[str, Any]) -> None:
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    headings = [line.lstrip("#").strip().lower() for line in (ROOT / file).read_text().splitlines() if line[:1] == "#"]
    assert anchor in headings
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len(rule["annotations"]["description"].split()) > 5


# --- under a load


@dataclass
class Seen:
    """What is left of a load: a Prometheus that watched it, the engine's last word, and the last scrape."""

    prometheus: PrometheusServer
    start: float
    end: float
    snapshot: dict[str, Any]
    text: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("watched")
    model = make_tiny(folder / "tiny", "llama", overrides={"max_position_embeddings": 2048})
    config = OWN_CONFIGS["llama"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    layout = KVLayout(16, config["num_hidden_layers"], config["num_key_value_heads"], width, "float32")
    flags = (f"--num-blocks={NUM_BLOCKS}", f"--host-pool={NUM_HOST_BLOCKS * layout.bytes_per_block}", "--max-rows=16")
    (folder / "server.key").write_bytes(b"0123456789abcdef0123456789abcdef")
    with RedisServer(folder) as redis:
        shared, fickle = (f"--redis={redis.url}", f"--server-key-file={folder}/server.key"), Fickle()
        watched = Watched(
            folder, model, *shared, "--vllm-metric-names",
            "--preemption=swap", "--beat-seconds=0.3", "--silence-seconds=1.5", "--max-step-tokens=64",
        )  # fmt: skip
        try:
            gateway = watched.start_gateway(*shared, f"--controllers={fickle.url}")
            with PrometheusServer(folder, watched.url, gateway) as prometheus:
                start = time.time()
                watched.start_worker(*flags)
                asyncio.run(Load(watched, redis, flags, gateway, fickle).play())
                text = httpx.get(f"{watched.url}/metrics", timeout=60).text
                snapshot = watched.ask("snapshot")
                prometheus.wait_for_scrapes(time.time())
                yield Seen(prometheus, start, time.time(), snapshot, text)
        finally:
            watched.close()


def finite(values: dict[float, float]) -> list[float]:
    return [value for value in values.values() if math.isfinite(value)]


@pytest.mark.parametrize(("board", "panel", "promql"), queries())
def test_a_panels_expression_returns_data_that_moved(seen: Seen, board: str, panel: str, promql: str) -> None:
    series = [finite(values) for _, values in seen.prometheus.over(promql, seen.start, seen.end)]
    assert any(series), "no data"
    moved = any(len(set(values)) > 1 for values in series)
    assert moved == (panel not in CONSTANT), f"{board}: {CONSTANT.get(panel, 'it never changed')}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_fires_when_it_should_and_not_before(seen: Seen, rule: dict[str, Any]) -> None:
    """Its expression has values while the fault lasts, and had none in the quiet before."""
    over = seen.prometheus.over(rule["expr"], seen.start, seen.end)
    assert any(finite(values) for _, values in over), "it never fired"
    assert not any(at < QUIET_UNTIL + seen.start for _, values in over for at in values) or rule["alert"] in AT_START
    states = seen.prometheus.over(f'ALERTS{{alertname="{rule["alert"]}"}}', seen.start, seen.end)
    assert states, "Prometheus itself did not raise it"


QUIET_UNTIL = 1.0
AT_START = ("KilburnNotServing", "KilburnGatewayNotServing")  # rightly so: there is no worker yet


def test_prometheus_found_no_fault_in_rules_and_scrapes(seen: Seen) -> None:
    rules = [rule for group in seen.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert {rule["health"] for rule in rules} == {"ok"}
    targets = seen.prometheus.ask("targets")["activeTargets"]
    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * 2


def test_promtool_takes_the_figures(seen: Seen) -> None:
    ours = "".join(line + "\n" for line in seen.text.splitlines() if "vllm:" not in line)  # those have colons
    done = subprocess.run(
        [binary("promtool"), "check", "metrics"], input=ours, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


AGREE = {
    'sum(kilburn_blocks{tier="device",state="free"})': "free_blocks",
    'sum(kilburn_blocks{tier="device",state="cached"})': "cached_blocks",
    'sum(kilburn_blocks{tier="device",state="owned"})': "owned_blocks",
    'sum(kilburn_blocks{tier="device",state="quarantined"})': "quarantined_blocks",
    'sum(kilburn_blocks{tier="device"})': "num_blocks",
    'sum(kilburn_blocks{tier="host"})': "num_host_blocks",
    'sum(kilburn_blocks{tier="host",state="cached"})': "cached_host_blocks",
    'sum(kilburn_blocks_of_which{kind="pinned"})': "pinned_owned_blocks",
    'sum(kilburn_blocks_of_which{tier="device",kind="shared"})': "shared_blocks",
    "sum(kilburn_owned_slots)": "owned_slots",
    "sum(kilburn_filled_slots)": "filled_slots",
    "sum(kilburn_tail_slots)": "tail_slots",
    "sum(kilburn_saved_blocks)": "shared_refs",
    "sum(kilburn_block_copies_total)": "block_copies",
    'sum(kilburn_evictions_total{tier="device"})': "evictions",
    'sum(kilburn_evictions_total{tier="host"})': "host_evictions",
    "sum(kilburn_prefix_query_tokens_total)": "prefix_query_tokens",
    "sum(kilburn_prefix_hit_tokens_total)": "prefix_hit_tokens",
    'sum(kilburn_prefix_hit_tokens_total{tier="host"})': "prefix_host_hit_tokens",
    'sum(kilburn_preemptions_total{mode="swap"})': "preempted_by_swap",
    'sum(kilburn_preemptions_total{mode="recompute"})': "preempted_by_recompute",
    "sum(kilburn_swapped_in_total)": "swapped_in",
    'sum(kilburn_swap_blocks_total{direction="out"})': "blocks_out",
    'sum(kilburn_swap_blocks_total{direction="in"})': "blocks_in",
    'sum(kilburn_move_seconds_total{direction="out"})': "swap_out_s",
    "sum(kilburn_host_saved_blocks_total)": "blocks_saved",
    "sum(kilburn_host_hit_blocks_total)": "host_hits",
    "sum(kilburn_requests_running)": "running_requests",
    "sum(kilburn_requests_waiting)": "waiting_requests",
    "sum(kilburn_steps_total)": "steps",
    "sum(kilburn_step_generated_tokens_total)": "generated_tokens",
    'sum(kilburn_worker_seconds_total{phase="forward"})': "worker_forward_s",
    'sum(kilburn_block_lifetime_seconds_count{tier="device"})': "evictions",
    "sum(kilburn_step_rows_count)": "steps",
    'sum(kilburn_preemption_seconds_total{mode="swap",what="predicted"})': "predicted_swap_s",
    'sum(kilburn_preemption_seconds_total{mode="swap",what="actual"})': "actual_swap_s",
}
WHOLE = {
    "sum(kilburn_requests)": "requests",
    "sum(kilburn_requests_queued)": "waiting_requests",
    "sum(kilburn_requests_homeless)": "homeless_requests",
    "sum(kilburn_leases_began_total)": "leases_began",
    "sum(kilburn_leases_ended_total)": "leases_ended",
    "sum(kilburn_requests_displaced_total)": "requests_displaced",
    "sum(kilburn_requests_recovered_total)": "requests_recovered",
    "sum(kilburn_laws_broken_total)": "laws_broken",
}


@pytest.mark.parametrize("promql", [*AGREE, *WHOLE])
def test_prometheus_has_what_the_engine_says(seen: Seen, promql: str) -> None:
    (group,) = seen.snapshot["groups"]
    wanted = group[AGREE[promql]] if promql in AGREE else seen.snapshot[WHOLE[promql]]
    ((_, value),) = seen.prometheus.now(promql)
    assert value == pytest.approx(wanted)


def test_the_memory_of_a_worker_is_its_ledger(seen: Seen) -> None:
    (group,) = seen.snapshot["groups"]
    found = {labels["part"]: value for labels, value in seen.prometheus.now("kilburn_memory_bytes")}
    assert found["kv_pool"] == NUM_BLOCKS * group["bytes_per_block"]
    assert found["host_pool"] == NUM_HOST_BLOCKS * group["bytes_per_block"]
    for part, amount in group["memory"].items():
        assert found[part] == amount
    assert min(found["weights"], found["activations"], found["logits"], found["buffers"]) > 0


def test_nothing_is_left_once_everybody_has_gone(seen: Seen) -> None:
    (group,) = seen.snapshot["groups"]
    assert group["owned_blocks"] == group["pinned_owned_blocks"] > 0, "a named prefix stays"
    for name in ("kilburn_requests", "kilburn_streams_open", "kilburn_outbox_characters", "kilburn_requests_waiting",
                 "kilburn_sequences_running", "kilburn_owned_slots", "vllm:num_requests_running"):  # fmt: skip
        assert sum(value for _, value in seen.prometheus.now(name)) == 0, name
    device = seen.prometheus.now('sum(kilburn_blocks{tier="device"})')
    assert device[0][1] == NUM_BLOCKS


def test_the_load_was_one(seen: Seen) -> None:
    """Preemption both ways, swap, sharing, copies, a worker's death and a broken law: or the rest means nothing."""
    for promql in (
        'max_over_time(sum(kilburn_preemptions_total{mode="swap"})[90s:1s])',
        'max_over_time(sum(kilburn_preemptions_total{mode="recompute"})[90s:1s])',
        'max_over_time(sum(kilburn_blocks_of_which{tier="device",kind="shared"})[90s:1s])',
        'max_over_time(sum(kilburn_swap_bytes_total{direction="in"})[90s:1s])',
        "sum(kilburn_requests_recovered_total)",
        "sum(kilburn_laws_broken_total)",
    ):
        ((_, value),) = seen.prometheus.now(promql)
        assert value > 0, promql
