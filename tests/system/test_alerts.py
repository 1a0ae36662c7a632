"""Each alert by itself, as `promtool test rules` has it: it fires after what it is for, and not after what it is not.

Series are promtool's shorthand, a value each quarter of a minute: `0+2x80` begins at 0 and grows by 2, eighty times;
`5x80` stays 5; `_x80` are no samples, which is what a dead controller says of itself.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.system.prometheus_server import SETTINGS, binary

HERE = {"instance": "c:8000", "job": "kilburn"}
GROUP = HERE | {"group": "w"}


@dataclass(frozen=True)
class Case:
    """Whether an alert fires at a time, given what was seen until then."""

    alert: str
    what: str
    fires: bool
    series: dict[str, str] = field(default_factory=dict)  # by name and own labels
    at: str = "20m"


def pool(can_be_had: int, **waiting: int) -> dict[str, str]:
    """A pool of 100 blocks of which so many are free, and requests that wait, by reason."""
    blocks = {"free": can_be_had, "cached": 0, "owned": 100 - can_be_had, "quarantined": 0}
    seen = {f'kilburn_blocks{{tier="device",state="{state}"}}': f"{number}x80" for state, number in blocks.items()}
    seen['kilburn_blocks{tier="host",state="free"}'] = "1000x80"
    for reason in ("blocks", "rows", "budget", "preempted", "prefix"):
        seen[f'kilburn_requests_waiting{{reason="{reason}"}}'] = f"{waiting.get(reason, 0)}x80"
    return seen


def queue(waiting: str, refused: str = "0x80", code: str = "queue_full") -> dict[str, str]:
    return {"kilburn_requests_queued": waiting, f'kilburn_requests_refused_total{{reason="{code}"}}': refused}


def found(hits: str, looked_up: str, evicted: str) -> dict[str, str]:
    return {
        'kilburn_prefix_hit_tokens_total{tier="device"}': hits,
        "kilburn_prefix_query_tokens_total": looked_up,
        'kilburn_evictions_total{tier="device"}': evicted,
    }


def controllers(ready: str, lost: str = "0x80") -> dict[str, str]:
    """As a gateway sees them."""
    seen = {"ready": ready, "unready": "0x80", "lost": lost}
    return {f'kilburn_gateway_controllers{{state="{state}"}}': values for state, values in seen.items()}


GATE_UP = 'up{job="kilburn-gateway"}'
BROKEN, UNANSWERED = "kilburn_gateway_streams_broken_total", "kilburn_gateway_requests_unanswered_total"
LAWS, LEASES = "kilburn_laws_broken_total", "kilburn_leases_ended_total"
PREEMPTED = 'kilburn_preemptions_total{mode="swap",reason="cost"}'
CASES = (
    Case("KilburnNotServing", "no worker", True, {"kilburn_up_to_serve": "0x80", "up": "1x80"}),
    Case("KilburnNotServing", "the controller died", True, {"kilburn_up_to_serve": "1x60 _x20", "up": "1x60 0x20"}),
    Case("KilburnNotServing", "all is well", False, {"kilburn_up_to_serve": "1x80", "up": "1x80"}),
    Case("KilburnNotServing", "a restart", False, {"kilburn_up_to_serve": "1x77 0x1 1x2", "up": "1x80"}),
    Case("KilburnLeaseLost", "a worker was lost", True, {LEASES: "0x70 1x10"}),
    Case("KilburnLeaseLost", "long ago", False, {LEASES: "0x20 1x60"}),
    Case("KilburnPoolExhausted", "nothing is free, and somebody waits", True, pool(3, rows=1)),
    Case("KilburnPoolExhausted", "a large prompt waits for more than there is", True, pool(10, blocks=1)),
    Case("KilburnPoolExhausted", "nothing is free, and nobody waits", False, pool(0)),
    Case("KilburnPoolExhausted", "there is room, and rows are what is waited for", False, pool(10, rows=9)),
    Case("KilburnPreemptionStorm", "one every five seconds", True, {PREEMPTED: "0+3x80"}),
    Case("KilburnPreemptionStorm", "one a minute", False, {PREEMPTED: "0+1x20 20x60"}),
    Case("KilburnQueueGrowing", "it grows", True, queue("1+1x80")),
    Case("KilburnQueueGrowing", "it is full and refuses", True, queue("2x80", "0+1x80")),
    Case("KilburnQueueGrowing", "it is long, and no longer than before", False, queue("50x80")),
    Case("KilburnQueueGrowing", "it shrinks", False, queue("90-1x80")),
    Case("KilburnQueueGrowing", "a single burst was refused", False, queue("2x80", "0x57 9x23")),
    Case("KilburnQueueGrowing", "clients ask for too much", False, queue("2x80", "0+1x80", "context_length_exceeded")),
    Case("KilburnLowHitRate", "little is found while blocks are evicted", True,
         found("0+10x160", "0+100x160", "0+3x160"), "40m"),
    Case("KilburnLowHitRate", "much is found", False, found("0+50x160", "0+100x160", "0+3x160"), "40m"),
    Case("KilburnLowHitRate", "nothing is evicted", False, found("0+10x160", "0+100x160", "0x160"), "40m"),
    Case("KilburnLawBroken", "one was", True, {LAWS: "0x70 1x10"}),
    Case("KilburnLawBroken", "none was", False, {LAWS: "0x80"}),
    Case("KilburnRegistryDown", "Redis is silent", True, {"kilburn_registry_up": "1x40 0x40"}),
    Case("KilburnRegistryDown", "a gateway does not reach it", True,
         {"kilburn_registry_up": "1x80", "kilburn_gateway_registry_up": "1x40 0x40"}),
    Case("KilburnRegistryDown", "for a moment", False, {"kilburn_registry_up": "1x76 0x4"}),
    Case("KilburnRegistryDown", "it answers", False, {"kilburn_registry_up": "1x80"}),
    Case("KilburnGatewayNotServing", "no controller is ready", True, controllers("0x80", "2x80") | {GATE_UP: "1x80"}),
    Case("KilburnGatewayNotServing", "the gateway died", True, controllers("1x60 _x20") | {GATE_UP: "1x60 0x20"}),
    Case("KilburnGatewayNotServing", "one is ready", False, controllers("1x80", "2x80") | {GATE_UP: "1x80"}),
    Case("KilburnGatewayNotServing", "a controller died", False, {"up": "0x80", GATE_UP: "1x80"}),
    Case("KilburnControllerLost", "one is", True, controllers("1x80", "0x60 1x20")),
    Case("KilburnControllerLost", "for a moment", False, controllers("1x80", "0x77 1x1 0x2")),
    Case("KilburnGatewayFailing", "a stream broke", True, {BROKEN: "0x70 1x10", UNANSWERED: "0x80"}),
    Case("KilburnGatewayFailing", "nobody took a request", True, {BROKEN: "0x80", UNANSWERED: "3x70 4x10"}),
    Case("KilburnGatewayFailing", "long ago", False, {BROKEN: "0x20 1x60", UNANSWERED: "0x20 1x60"}),
)  # fmt: skip


def with_labels(name: str) -> str:
    """A series as a scrape of one controller, or of one gateway, would leave it."""
    name, _, own = name.partition("{")
    labels = GROUP if name in OF_GROUPS else HERE
    pairs = [f'{key}="{value}"' for key, value in labels.items() if not own.startswith(f"{key}=")]
    return name + "{" + ",".join([*pairs, *filter(None, [own[:-1]])]) + "}"


OF_GROUPS = {
    "kilburn_blocks", "kilburn_requests_waiting", "kilburn_preemptions_total", "kilburn_prefix_hit_tokens_total",
    "kilburn_prefix_query_tokens_total", "kilburn_evictions_total",
}  # fmt: skip


def as_promtool_has_it(case: Case) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    wanted = [{"labels": "{}", "value": 1}] if case.fires else []
    return {
        "name": f"{case.alert}: {case.what}",
        "interval": "15s",
        "input_series": [{"series": with_labels(name), "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": case.at, "exp_samples": wanted}],
    }


def run(cases: Sequence[Case], folder: Path) -> tuple[int, str]:
    tests = [as_promtool_has_it(case) for case in cases]
    text = {"rule_files": [str(SETTINGS / "alerts.yml")], "evaluation_interval": "15s", "tests": tests}
    (folder / "cases.yml").write_text(yaml.safe_dump(text))
    words = [binary("promtool"), "test", "rules", str(folder / "cases.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_alerts_fire_after_what_they_are_for_and_after_nothing_else(tmp_path: Path) -> None:
    code, text = run(CASES, tmp_path)
    assert code == 0, text
    one_of_each = [next(case for case in CASES if case.fires is fires) for fires in (True, False)]
    code, text = run([replace(case, fires=not case.fires) for case in one_of_each], tmp_path)
    assert (code, text.count("got:")) == (1, 2), "promtool finds a case that is wrong"


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    groups = yaml.safe_load((SETTINGS / "alerts.yml").read_text())["groups"]
    for alert in [rule["alert"] for group in groups for rule in group["rules"]]:
        assert {case.fires for case in CASES if case.alert == alert} == {True, False}, alert
