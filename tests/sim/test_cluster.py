"""Clusters on a clock that jumps: what steps hold, what clients see, and what other ideas of memory cost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from time import sleep

import pytest

from bench.paper_real import Measured, fitted, simulated
from kilburn.controller import cli
from kilburn.controller.capacity import cases, cluster_of, recommended, simulate, together
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, BeamSettings, Event, Finished, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.cluster import Cluster, Worker
from kilburn.controller.simulate.demand import Decoding, best_hit_share, cut, poisson, replayed, submits, superposed
from kilburn.controller.simulate.devices import DEVICES, DeviceError, Reach, measured
from kilburn.controller.simulate.fake_daemon import fake_hello, limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.metered import Metered, StepCosts
from kilburn.controller.simulate.outcome import Outcome, outcome_of
from kilburn.controller.simulate.quick import QuickWorker
from kilburn.controller.simulate.record import Objectives, Record, spread
from kilburn.controller.simulate.roofline import KNOWN_MODELS, Linear, Load, Roofline, known_shape
from kilburn.controller.simulate.sizing import Run, Setup, Watch, run_all
from kilburn.controller.simulate.traces import MOONCAKE_BLOCK, Asked, TraceError
from kilburn.shared.config import KV_POLICIES, SettingsError, SimulateSettings, load
from kilburn.shared.layout import KVLayout
from kilburn.shared.ledger import layout_for
from kilburn.shared.messages import StepPlan, Welcome
from kilburn.shared.sampling import Sampling

LAYOUT = KVLayout(4, 1, 1, 8, "float32")
PRICES = Linear(fixed_s=2e-3, row_s=5e-5, token_s=5e-5)
SMALL = Setup(LAYOUT, PRICES, 128, max_rows=32, max_step_tokens=64, max_len=128, vocab_size=1 << 31)


def lengths(count: int, seed: int = 1) -> list[Asked]:
    rng = Random(seed)
    return [Asked(None, rng.randint(1, 50), rng.randint(1, 60)) for _ in range(count)]


def outcome(setup: Setup, asked: Sequence[Asked], objectives: Objectives | None = None) -> Outcome:
    ((record, tally),) = run_all([Run(setup, asked, watch=Watch(sample_s=0.01))])
    return outcome_of(record, tally, objectives or Objectives())


# --- what steps hold


def test_a_load_is_what_a_worker_with_contents_computes() -> None:
    """Twins: the same plans, chunks and beams and samples and preemptions among them."""
    hello = fake_hello(block_size=4, num_blocks=60, num_host_blocks=30, max_rows=16, max_step_tokens=24, max_len=80)
    engine, quick, fake = Engine(EngineSettings(max_waiting=100)), QuickWorker(), FakeWorker(1, limits_of(hello), 512)
    rng, events = Random(5), list[Event]()
    for number in range(30):
        beams = BeamSettings(3) if number % 5 == 0 else None
        n = 3 if number % 5 in (0, 1) else 1
        prompt = [rng.randrange(5, 500) for _ in range(rng.randint(1, 30))]
        events.append(Submit(number, prompt, rng.randint(1, 24), Sampling(seed=number), n=n, beams=beams))
    pending: list[Event] = [Arrived(b"x", hello), *events]
    seen = Load()
    while pending:
        effects, pending = engine.handle(pending, 0.0), []
        for effect in effects:
            match effect:
                case Send(message=Welcome(lease)):
                    fake = FakeWorker(lease, limits_of(hello), hello.vocab_size)
                case Send(message=StepPlan() as plan):
                    theirs = fake.run(plan)
                    ours, load = quick.run(plan)
                    assert ours.num_tokens == theirs.num_tokens
                    assert len(ours.logprobs) == len(theirs.logprobs)
                    attended = sum(
                        sum(range(fake.rows[row].num_computed - count + 1, fake.rows[row].num_computed + 1))
                        for row, count in zip(plan.rows, plan.counts, strict=True)
                    )
                    assert load.num_cells + load.num_pairs == attended
                    assert load.num_tokens == sum(plan.counts)
                    assert load.num_sampled == sum(count > 0 for count in theirs.num_tokens)
                    for name in ("num_chunks", "num_rows", "num_moved", "num_copied"):
                        setattr(seen, name, getattr(seen, name) + getattr(load, name))
                    pending.append(Arrived(b"x", theirs))
                case Finished(message=message):
                    assert not message
    assert min(seen.num_chunks, seen.num_rows, seen.num_moved, seen.num_copied) > 5, seen


def test_clients_wait_as_long_as_those_of_the_metered_engine() -> None:
    asked = poisson(lengths(50), rate=240.0, seconds=0.4, seed=2)
    hello = SMALL.hello(0)
    metered = Metered(SMALL.engine_settings(), hello, StepCosts(2e-3, 5e-5, 0.0, 5e-5, 0.0))
    for timed in submits(asked, Decoding()):
        metered.submit(timed.at_s, timed.submit)
    metered.run()
    ((record, tally),) = run_all([Run(SMALL, asked)])
    assert len(record.seen) == len(asked) > 60
    assert tally.preempted.total() > 0
    for number, seen in enumerate(record.seen.values()):
        case = metered.cases[number]
        assert (seen.first_s, seen.last_s) == pytest.approx((case.tokens_s[0], case.ended_s))
        assert seen.num_tokens == len(case.tokens) == asked[number].num_output
    gaps = [gap for case in metered.cases.values() for gap in case.gaps_s]
    assert outcome_of(record, tally).gap_s["mean"] == pytest.approx(spread(gaps)["mean"], abs=1e-4)


# --- other ideas of memory


def test_every_policy_answers_everybody_and_only_memory_differs() -> None:
    asked = poisson(lengths(80), rate=250.0, seconds=0.3, seed=3)
    found = {policy: outcome(replace(SMALL, policy=policy), asked) for policy in KV_POLICIES}
    for policy, one in found.items():
        assert one.num_requests == len(asked) > 60, policy
        assert one.num_output_tokens == sum(a.num_output for a in asked)
        assert sum(one.pool.values()) == pytest.approx(1)
    rows = {policy: one.mean_rows for policy, one in found.items()}
    assert rows["orca-max"] < rows["orca-pow2"] < rows["orca-oracle"] < rows["paged"]
    assert rows["orca-max"] <= 512 // 128
    used = {policy: one.pool["used"] for policy, one in found.items()}
    assert used["orca-max"] < used["orca-oracle"] < used["paged"]
    # A batch's rows go on until its longest ends, so it computes more and takes longer.
    assert found["batch"].num_sequence_steps > found["orca-max"].num_sequence_steps
    assert found["batch"].seconds > found["orca-max"].seconds > found["paged"].seconds
    assert found["paged"].preempted_recompute > 0
    assert found["orca-oracle"].preempted_recompute == 0


def test_nobody_joins_a_batch() -> None:
    """Two that come together run together; the third waits for both, though there is room."""
    asked = [Asked(0.0, 4, 5), Asked(0.0, 4, 20), Asked(1e-4, 4, 3)]
    ((record, _),) = run_all([Run(replace(SMALL, policy="batch"), asked)])
    first, second, third = record.seen.values()
    assert first.last_s == second.last_s < third.first_s
    assert (first.num_tokens, second.num_tokens, third.num_tokens) == (5, 20, 3)


def test_samples_and_beams_reserve_as_often_as_they_are() -> None:
    asked = [Asked(0.0, 20, 10)] * 12
    for decoding in (Decoding(n=4), Decoding(n=4, beams=True)):
        oracle = outcome(replace(SMALL, policy="orca-oracle", decoding=decoding), asked)
        paged = outcome(replace(SMALL, decoding=decoding), asked)
        assert oracle.num_requests == paged.num_requests == 12
        # Pieces of 32 slots for each of 4 sequences: 16 in 512 slots. Paged, the prompt is there once.
        assert oracle.mean_rows <= 16
        assert oracle.num_steps > 1.3 * paged.num_steps
        assert paged.saved_share > 0.3


# --- many controllers


def test_controllers_in_processes_come_to_the_same() -> None:
    setup = replace(SMALL, num_groups=5)
    run = Run(setup, poisson(lengths(100), rate=300.0, seconds=0.3, seed=4), num_controllers=2)
    assert [(share.num_groups, len(asked)) for share, asked in run.shares()] == [
        (3, -(-len(run.asked) // 2)),
        (2, len(run.asked) // 2),
    ]
    heard: list[int] = []
    alone, together = (run_all([run], jobs, heard.append)[0] for jobs in (1, 2))
    assert sum(heard) == 2 * len(run.asked)
    assert alone[1] == together[1]
    assert sorted(alone[0].seen.values(), key=repr) == sorted(together[0].seen.values(), key=repr)
    assert alone[0].gaps == together[0].gaps
    assert outcome_of(*alone).num_requests == len(run.asked)
    assert alone[1].num_groups == 5


def test_more_groups_serve_sooner() -> None:
    asked = poisson(lengths(100), rate=400.0, seconds=0.2, seed=4)
    one, four = (outcome(replace(SMALL, num_groups=groups), asked) for groups in (1, 4))
    assert four.normalized_s["mean"] < one.normalized_s["mean"]
    assert four.mean_rows < one.mean_rows


# --- machines


def test_the_papers_model_is_as_large_as_the_paper_says() -> None:
    """Kwon et al. 2023, Table 1 and section 3: 26, 132 and 346 GB of parameters, 800 KB of KV a token."""
    sizes = {name: known_shape(name, "float16", 1) for name in KNOWN_MODELS}
    found = {name: round(shape.weight_bytes / 1e9) for name, shape in sizes.items() if shape and "opt" in name}
    assert found == {"opt-13b": 26, "opt-66b": 131, "opt-175b": 349}
    shape = sizes["opt-13b"]
    assert shape is not None
    assert layout_for(shape, 16, "float16").bytes_per_token == 800 * 1024
    assert known_shape("opt-13b", "float16", 3) is None
    quarter = known_shape("llama-3.1-70b", "bfloat16", 4)
    assert quarter is not None
    assert (quarter.num_heads, quarter.num_kv_heads, round(quarter.weight_bytes / 1e9)) == (16, 2, 35)


def test_a_step_takes_the_larger_of_what_it_computes_and_what_it_reads() -> None:
    shape = known_shape("llama-2-7b", "float16", 1)
    assert shape is not None
    layout, device = layout_for(shape, 16, "float16"), DEVICES["a100-80gb"]
    free = Reach(1.0, 1.0, 1.0, 1.0, step_s=0.0, layer_s=0.0, reduce_s=0.0, move_s=0.0)
    machine = Roofline(device, free, shape, layout, "float16", 1)
    alone = machine.seconds(Load(num_rows=1, num_cells=1000, num_sampled=1))[1]
    # 13.2 GB of weights and 0.5 GB of KV at 2,039 GB/s.
    assert alone == pytest.approx((13.21e9 + 0.525e9) / 2039e9, rel=0.01)
    prompt = machine.seconds(Load(num_chunks=1, num_chunk_tokens=2048, num_pairs=2048 * 2049 // 2, num_sampled=1))[1]
    # 6.48e9 weights, 2 operations each, and attention's 4 x 32 layers x 4096 for each pair, at 312 T/s.
    assert prompt == pytest.approx((2 * 6.476e9 * 2048 + 4 * 32 * 4096 * 2048 * 2049 / 2) / 312e12, rel=0.01)
    two = known_shape("llama-2-7b", "float16", 2)
    assert two is not None
    halves = Roofline(device, free, two, layout_for(two, 16, "float16"), "float16", 2)
    assert alone / 2 < halves.seconds(Load(num_rows=1, num_cells=1000, num_sampled=1))[1] < alone * 0.52
    moved = machine.seconds(Load(num_moved=10))
    assert moved == (pytest.approx(10 * layout.bytes_per_block / 32e9), 0.0)


def test_what_was_measured_replaces_what_is_published(tmp_path: Path) -> None:
    report = {
        "device": "NVIDIA H200",
        "copy_gb_s": 4000.0,
        "parts": {
            "decode": {"rows": [{"batch": 1, "of_copy": 0.2}, {"batch": 16, "of_copy": 0.9}]},
            "block_sizes": {"rows": [{"block_size": 8, "of_copy": 0.5}, {"block_size": 16, "of_copy": 0.9}]},
            "moves": {"rows": [{"swap_out_gb_s": 50.0, "swap_in_gb_s": 50.0}]},
            "twins": {"not_run": "out of time"},
        },
    }
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(report))
    device, reach = measured(path)
    assert device.name == "h200-141gb"
    assert reach.bandwidth == pytest.approx(3600 / 4800)
    assert (reach.attention(1), reach.attention(128)) == (pytest.approx(2000 / 4800), pytest.approx(3600 / 4800))
    assert reach.host_link == pytest.approx(50 / 64)
    for change, fault in (
        ({"device": "NVIDIA GT 710"}, "the table knows nothing"),
        ({"copy_gb_s": None}, "no report of bench/gpu_check.py"),
        ({"parts": {"decode": {"rows": [{"batch": 16}]}}}, "a row lacks something"),
    ):
        path.write_text(json.dumps(report | change))
        with pytest.raises(DeviceError, match=fault):
            measured(path)


# --- requests


def test_prefixes_of_a_trace_are_found_as_often_as_they_could_be() -> None:
    """Far apart, in a pool that holds everything, nothing that came before is missed."""
    blocks = [(0, 1, 2), (0, 1, 3), (4,), (0, 5), (0, 1, 2)]
    asked = [Asked(10.0 * i, MOONCAKE_BLOCK * len(b) - 100, 2, "", b) for i, b in enumerate(blocks)]
    setup = replace(SMALL, layout=replace(LAYOUT, block_size=16), num_blocks=1000, max_len=4096, max_step_tokens=512)
    best = best_hit_share(asked, 16)
    # Whole blocks of 16 of: two blocks and none, one, and all but the newest token of the last.
    assert best == (1024 + 512 + 1424) / sum(a.num_prompt for a in asked)
    assert outcome(setup, asked).hit_share == pytest.approx(best)
    total = sum(a.num_prompt for a in asked)
    for num_blocks, tokens in ((100, 2336), (150, 2736), (180, 2960)):  # what is kept longest is what was in use last
        assert best_hit_share(asked, 16, num_blocks=num_blocks) == tokens / total <= best
        found = outcome(replace(setup, num_blocks=num_blocks), asked).hit_share
        assert tokens - 16 <= round(found * total) <= tokens  # the engine keeps a block or so free
    assert outcome(replace(setup, num_blocks=100, num_host_blocks=1000), asked).hit_share == pytest.approx(best)
    assert outcome(replace(setup, decoding=Decoding(shares=False)), asked).hit_share == 0


def test_arrivals() -> None:
    drawn = poisson(lengths(9), rate=50.0, seconds=40.0, seed=1)
    assert len(drawn) == pytest.approx(2000, abs=5 * 2000**0.5)
    assert all(0 < (a.at_s or 0) < 40 for a in drawn)
    trace = [Asked(3.0, 1, 1), Asked(1.0, 2, 1), Asked(9.0, 3, 1)]
    assert replayed(trace, speed=2.0, seconds=5.0) == [Asked(0.5, 2, 1), Asked(1.5, 1, 1)]
    assert together([trace, [Asked(2.0, 4, 1)]])[1] == Asked(2.0, 4, 1)
    with pytest.raises(TraceError, match="only some of the traces have times"):
        together([trace, [Asked(None, 4, 1)]])
    # Copies of a trace begin at other moments, go round, and have nothing in common.
    trace = [Asked(0.0, 1, 1, "", (7,)), Asked(4.0, 2, 1), Asked(10.0, 3, 1)]
    twice = superposed(trace, 2, 8.0)
    assert [(a.at_s, a.num_prompt) for a in twice] == [(0.0, 1), (4.0, 2), (5.0, 1), (5.0, 3)]
    assert twice[0].prefix_blocks != twice[2].prefix_blocks != ()
    assert superposed(trace, 1, 0.0) == trace
    assert len(superposed(trace, 3, 0.0)) >= 3 * len(trace) - 3  # one that comes as another copy's end may be cut
    assert cut(Asked(None, 900, 800), 1000) == Asked(None, 500, 500)
    assert cut(Asked(None, 0, 8), 1000) == Asked(None, 1, 8)


# --- the command

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.5,{100 + 40 * second},{5 + second}\n" for second in range(30)
)


def test_the_command_tells_all_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    words = ["llama-3.1-8b", "--trace", str(path), "--groups", "1,2", "--jobs", "1"]
    assert cli.main(["simulate", *words, "--price", "3.6", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["device"]["source"].startswith("NVIDIA A100")
    assert [run["groups"] for run in made["runs"]] == [1, 2]
    for run in made["runs"]:
        assert (run["num_requests"], run["num_output_tokens"]) == (30, sum(5 + s for s in range(30)))
        paid = 3.6 * run["groups"] * run["seconds"] / 3600
        assert run["cost_per_million"] == pytest.approx(paid / run["num_output_tokens"] * 1e6)
        assert run["good_share"] == 1.0
    assert cli.main(["simulate", *words]) == 0
    table = capsys.readouterr().out
    assert "llama-3.1-8b in bfloat16 on 1 x a100-80gb" in table
    assert "sequence-steps, " in table
    assert cli.main(["tune", "block-size", *words[:3], "--block-sizes", "8,256", "--json", "--jobs", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] in (8, 256)


def test_an_interrupt_ends_all_processes_without_a_word() -> None:
    """Ctrl-C goes to all of them; two are in the middle of something when it comes."""
    words = ["simulate", "llama-3.1-8b", "--groups", "16", "--rates", "5", "--seconds", "1h", "--jobs", "2"]
    command = [sys.executable, "-m", "kilburn.controller.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while running.poll() is None and len(children.read_text().split()) < 2:
            sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate()
    assert running.returncode == 130
    assert not said.strip()


def test_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each policy, across the rates; a panel only of what there is."""
    path = tmp_path / "runs.svg"
    words = ["opt-13b", "--gpu", "a100-40gb", "--rates", "1,2", "--seconds", "2s", "--policies", "paged,orca-max"]
    assert cli.main(["simulate", *words, "--jobs", "1", "--plot", str(path)]) == 0
    drawn = path.read_text()
    for word in ("requests a second", "policy orca-max", "within the objectives"):
        assert f"<!-- {word}" in drawn, word
    assert "<!-- cost" not in drawn
    capsys.readouterr()
    nowhere = str(tmp_path / "none" / "runs.svg")
    with pytest.raises(SystemExit):
        cli.main(["simulate", *words, "--plot", nowhere])
    assert "--plot: " in capsys.readouterr().err
    for words, fault in (
        (["--rates", "1", "--plot", "runs.doc"], "--plot: must end with .svg"),
        (["--rates", "1", "--load-factor", "2"], "--load-factor: multiplies the load of a trace"),
    ):
        with pytest.raises(SettingsError) as caught:
            load(SimulateSettings, ["opt-13b", *words], {}, "model")
        assert caught.value.problems[0].startswith(fault)


def test_a_recommendation_is_the_largest_that_costs_nothing() -> None:
    settings = SimulateSettings("opt-13b", rates=(1.0,), seconds=5.0, jobs=1, block_sizes=(4, 16, 128), gpu="a100-40gb")
    results = simulate(settings)
    best = min(result.outcome.normalized_s["mean"] for result in results)
    chosen = recommended(results, 1.0)
    assert chosen.outcome.normalized_s["mean"] <= best * 1.01
    assert recommended(results, 1e9).case.block_size == 128
    assert recommended(results, 0.0).outcome.normalized_s["mean"] == best


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--gpu", "a1000"], "--gpu: 'a1000' is no device of the table; give one of a100-40gb"),
        (["--gpu", "a10-24gb"], "--memory: 22.35 GiB do not hold weights of"),
        (["--tp", "7"], "--tp: 7 does not divide opt-13b"),
        (["--max-len", "4096"], "--max-len: 4096 is beyond the model's own length; give 2048"),
        (["--host-pool", "25%"], "--host-pool: a share of what?"),
        (["--trace", "nowhere.csv"], "--trace: nowhere.csv: cannot be read"),
        (["--measured", "nowhere.json"], "--measured: nowhere.json: no report"),
        (["--num-blocks", "1000000"], "--num-blocks: a pool of 1000000 blocks"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(words: list[str], fault: str) -> None:
    settings = load(SimulateSettings, ["opt-13b", "--rates", "1", "--seconds", "5s", *words], {}, "model")
    with pytest.raises(SettingsError) as caught:
        list(cases(settings, cluster_of(settings)))
    assert fault in caught.value.problems[0]


def test_requests_that_nobody_times_are_refused() -> None:
    for words, fault in (([], "--rates: without a trace"), (["--rates", "1", "--seconds", "0"], "--seconds: only a")):
        with pytest.raises(SettingsError) as caught:
            load(SimulateSettings, ["opt-13b", *words], {}, "model")
        assert caught.value.problems[0].startswith(fault)


def test_prices_are_found_again_in_steps_that_were_made_by_them() -> None:
    """What the calibration fits: loads of a run, their seconds by known prices, each off by up to a twentieth."""
    rng, prices = Random(1), Linear(4e-3, 3e-4, 2e-7, 8e-5, 3e-8)
    loads: list[Load] = []
    worker = Worker(b"group-0", SMALL.hello(0), Kept(prices, loads), 0)
    cluster = Cluster(SMALL.engine_settings(), [worker], SMALL.gate(), Record(), steps_each=True)
    cluster.run(submits(poisson(lengths(60), rate=100.0, seconds=1.0, seed=6), Decoding()))
    seconds = [prices.seconds(one)[1] * rng.uniform(0.95, 1.05) for one in loads]
    found = fitted(Measured(loads, seconds))
    assert len(loads) > 200
    predicted = [found.seconds(one)[1] for one in loads]
    assert sum(predicted) == pytest.approx(sum(prices.seconds(one)[1] for one in loads), rel=0.02)
    for seconds_of, one in zip(predicted, loads, strict=True):
        assert seconds_of == pytest.approx(prices.seconds(one)[1], rel=0.1)
    assert min(found.fixed_s, found.row_s, found.cell_s, found.token_s, found.pair_s) >= 0
    # Where something costs nothing, noise makes it no price below nothing.
    free = fitted(Measured(loads, [1e-3 * rng.uniform(0.9, 1.1) for _ in loads]))
    assert min(free.fixed_s, free.row_s, free.cell_s, free.token_s, free.pair_s) >= 0


def test_prices_fitted_to_one_load_tell_what_others_take() -> None:
    """The calibration, over a machine that is no sum of prices: steps of a roofline, each off by up to a tenth."""
    shape = known_shape("llama-2-7b", "float16", 1)
    assert shape is not None
    layout = layout_for(shape, 16, "float16")
    # So slow in products that a batch of some rows is bound by them, as on a CPU.
    slow = replace(DEVICES["a10-24gb"], flops=8e12)
    real, rng = Roofline(slow, Reach(), shape, layout, "float16", 1), Random(3)
    setup = Setup(layout, Linear(), 120, max_rows=64, max_step_tokens=256, max_len=256)
    lengths = [Asked(None, rng.randint(5, 120), rng.randint(10, 120)) for _ in range(40)]
    loads, seconds = list[Load](), list[float]()

    class Uneven:
        def seconds(self, load: Load) -> tuple[float, float]:
            took_s = real.seconds(load)[1] * rng.uniform(0.9, 1.1)
            loads.append(replace(load))
            seconds.append(took_s)
            return 0.0, took_s

    uneven = replace(setup, machine=Uneven())
    together = outcome(uneven, [replace(one, at_s=0.0) for one in lengths])
    prices = fitted(Measured(list(loads), list(seconds)))
    for pace in (0.5, 0.8, 2.0):
        rate = pace * len(lengths) / together.seconds
        asked = poisson(lengths, rate, len(lengths) / rate, seed=5)
        truth, found = outcome(uneven, asked), simulated(setup, prices, asked)
        assert found.seconds == pytest.approx(truth.seconds, rel=0.15)
        assert found.normalized_s["mean"] == pytest.approx(truth.normalized_s["mean"], rel=0.15)
        assert found.mean_rows == pytest.approx(truth.mean_rows, rel=0.15)


class Kept:
    """A machine that remembers what it was asked."""

    def __init__(self, machine: Linear, loads: list[Load]) -> None:
        self._machine, self._loads = machine, loads

    def seconds(self, load: Load) -> tuple[float, float]:
        self._loads.append(load)
        return self._machine.seconds(load)
