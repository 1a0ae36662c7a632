"""KV of 8 bits from the settings to a worker's Hello: what is allocated, measured, moved, named and refused.

That tokens are what rounding alone would make of them, whatever the plans, is told by test_runner_world.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.dispatch import kernels_for
from kilburn.shared.config import SettingsError, WorkerSettings
from kilburn.shared.digest import ROOT, BlockHasher
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.worker import calibrate
from kilburn.worker.calibrate import digest_with, fixed_ids, largest_seen, scales_for, static_scales
from kilburn.worker.kv_cache import KVCache, scales_of, values_of
from kilburn.worker.models.weights import LoadedModel, load
from kilburn.worker.start import Ready, make_ready, scales_kept_in
from tests.worker.paged_harness import Line, batch_of
from tests.worker.tiny_models import make_tiny
from tests.worker.toy import CPU

NARROW = KVLayout(4, 3, 2, 8, "int8")
PROMPT = [50, 60, 70, 80, 90, 100, 110, 120, 130]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of other runs may not be found; compiled kernels, which take their folder elsewhere, may."""
    monkeypatch.setattr(calibrate, "cache_root", lambda: tmp_path / "cache")


# --- blocks and their scale areas


def test_a_scale_area_ends_a_block_and_overlaps_nothing() -> None:
    for layout in (NARROW, replace(NARROW, block_size=1, head_dim=5), replace(NARROW, num_layers=1, head_dim=1)):
        area = layout.with_scale_area()
        assert area.scale_bytes >= 4 * layout.num_layers * 2 * layout.num_kv_heads * layout.block_size
        assert area.bytes_per_block == layout.bytes_per_block + area.scale_bytes
        assert area.bytes_per_block % 16 == 0
        blocks = torch.zeros((3, area.bytes_per_block), dtype=torch.int8)
        values_of(blocks, area).fill_(1)
        scales_of(blocks, area).view(torch.int32).fill_(0x02020202)
        whole = (blocks == 1).sum() + (blocks == 2).sum()
        assert whole == 3 * (layout.values_per_block + 4 * area.scales_per_block)
        assert (blocks[:, : layout.values_per_block] == 1).all()
        assert (values_of(blocks, area) == 1).all()


def test_every_move_of_a_block_takes_its_scales_along() -> None:
    cache = KVCache(NARROW.with_scale_area(), 4, 2, CPU, kernels_for(CPU))
    assert cache.scales is not None
    assert cache.pool.shape == (4, 3, 2, 2, 4, 8)
    for block in range(4):
        cache.pool[block] = block
        for scales in cache.scales:
            scales[block] = block
    cache.move([(1, 0), (2, 1)], [(3, 1)], [])  # a copy into a block that was swapped out in the same plan
    cache.pool[2:] = 77
    for scales in cache.scales:
        scales[2:] = 77
    cache.move([], [], [(0, 2), (1, 3)])
    assert [set(cache.pool[block].flatten().tolist()) for block in range(4)] == [{0}, {3}, {1}, {2}]
    for scales in cache.scales:
        assert [set(scales[block].flatten().tolist()) for block in range(4)] == [{0}, {3}, {1}, {2}]


@pytest.mark.parametrize(
    ("layout", "static"),
    [
        (NARROW, None),
        (NARROW.with_scale_area(), torch.ones(3, 2, 2)),
        (replace(NARROW, dtype="float32"), torch.ones(3, 2, 2)),
        (replace(NARROW, dtype="float32").with_scale_area(), None),
    ],
)
def test_a_cache_has_one_kind_of_scales_if_it_is_of_8_bits(layout: KVLayout, static: Tensor | None) -> None:
    with pytest.raises(ValueError, match="kinds of scales"):
        KVCache(layout, 2, 0, CPU, reference, static)


# --- what is measured


def test_scales_hold_what_was_seen_and_do_not_follow_its_last_digits() -> None:
    largest = torch.tensor([[[3.0, 0.0]], [[1e-3, 500.0]]])
    scales = scales_for(largest, torch.int8)
    assert (scales * 127 >= largest * calibrate.MARGIN).all()
    assert (scales * 127 <= largest * calibrate.MARGIN * 1.1 + 1e-6).all()
    assert (scales > 0).all()
    assert torch.equal(scales, scales_for(largest * (1 + 1e-6), torch.int8))
    assert (scales_for(largest, torch.float8_e4m3fn) * 448 >= largest * calibrate.MARGIN).all()


def test_the_fixed_ids_are_of_the_vocabulary_and_spread_over_it() -> None:
    for vocab_size in (61, 49152, 128256):
        ids = [id for number in range(calibrate.NUM_SEQUENCES) for id in fixed_ids(number, 128, vocab_size)]
        assert all(0 <= id < vocab_size for id in ids)
        assert len({id * 16 // vocab_size for id in ids}) == 16


def test_what_was_measured_is_kept_and_what_is_spoilt_is_measured_anew(tmp_path: Path) -> None:
    loaded = load(make_tiny(tmp_path / "model"), torch.float32, CPU, kv_dtype=torch.int8)
    told: list[int] = []

    def measured() -> Tensor:
        told.clear()
        return static_scales(loaded, torch.float32, torch.int8, CPU, lambda what, done, total: told.append(done))

    first = measured()
    assert len(told) == calibrate.NUM_SEQUENCES
    assert torch.equal(first, scales_for(largest_seen(loaded, torch.float32, CPU), torch.int8))
    assert torch.equal(measured(), first)
    assert not told, "measured though it was kept"
    (kept,) = (tmp_path / "cache" / "kv-scales").iterdir()
    whole = json.loads(kept.read_text())
    for spoilt in (
        "",
        "{}",
        '{"version": 1, "scales": [1, 2]}',
        json.dumps(whole | {"version": 0}),
        json.dumps(whole | {"scales": (first * 0).tolist()}),
        json.dumps(whole).replace("[[[", "[[[NaN, ", 1),
    ):
        kept.write_text(spoilt)
        assert torch.equal(measured(), first)
        assert told, spoilt


# --- names


def test_two_workers_with_other_scales_share_no_names(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    plain, int8 = (load(folder, torch.float32, CPU, kv_dtype=dtype).digest for dtype in (torch.float32, torch.int8))
    layout, scales = KVLayout(16, 2, 2, 16, "int8"), torch.full((2, 2, 2), 0.03)
    other = scales.clone()
    other[1, 0, 1] = torch.nextafter(other[1, 0, 1], torch.tensor(1.0))
    digests = [
        digest_with(plain, replace(layout, dtype="float32"), None),
        digest_with(int8, layout, scales),
        digest_with(int8, layout, other),
        digest_with(int8, layout, scales.transpose(0, 1) * 2),
        digest_with(int8, layout.with_scale_area(), None),
    ]
    names = [BlockHasher(digest, 16).digest(ROOT, range(16)) for digest in digests]
    assert len(set(names)) == len(names)
    assert digests[0] == plain, "KV without scales is named as before"
    assert digests[1] == digest_with(int8, layout, scales.clone())


# --- settings


def asked(folder: Path, **changes: object) -> WorkerSettings:
    small = {"device": "cpu", "num_blocks": 8, "max_rows": 2, "max_step_tokens": 32, "max_len": 64}
    return WorkerSettings(str(folder), **{**small, **changes})  # type: ignore[arg-type]


ON_A_CPU = {"int8": ("block", "static")}


@pytest.mark.parametrize(
    ("given", "forms", "kept_in"),
    [
        ({}, ON_A_CPU, "auto"),
        ({"kv_dtype": "int8"}, ON_A_CPU, "block"),
        ({"kv_dtype": "int8", "kv_scales": "static"}, ON_A_CPU, "static"),
        ({"kv_dtype": "fp8"}, {"fp8": ("static",)}, "static"),
    ],
)
def test_where_scales_are_is_chosen_by_what_the_kernels_have(
    given: dict[str, str], forms: dict[str, tuple[str, ...]], kept_in: str
) -> None:
    assert scales_kept_in(WorkerSettings("m", **given), forms) == kept_in  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "forms", "wanted"),
    [
        ({"kv_dtype": "fp8"}, ON_A_CPU, r"--kv-dtype: .* fp8; give auto or int8$"),
        (
            {"kv_dtype": "fp8", "kv_scales": "block"},
            {"fp8": ("static",)},
            r"--kv-scales: .*block.*auto or static$",
        ),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(
    given: dict[str, str], forms: dict[str, tuple[str, ...]], wanted: str
) -> None:
    with pytest.raises(SettingsError, match=wanted):
        scales_kept_in(WorkerSettings("m", **given), forms)  # type: ignore[arg-type]


def test_scales_without_8_bits_and_fp8_on_a_cpu_are_refused(tmp_path: Path) -> None:
    from kilburn.shared.config import load as read

    with pytest.raises(SettingsError, match=r"--kv-scales: only KV of 8 bits has scales; give kv_dtype int8 or fp8"):
        read(WorkerSettings, ["m", "--kv-scales", "static"], {}, "model")
    with pytest.raises(SettingsError, match=r"--kv-dtype: this device has no kernels for KV of fp8; give auto or int8"):
        make_ready(asked(tmp_path, kv_dtype="fp8"))


# --- a whole worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "smollm", "smollm")


def greedy(ready: Ready, count: int) -> list[int]:
    """What a worker says to a prompt that comes in two chunks."""
    admit = Admit(1, 0, len(PROMPT), tuple(PROMPT), (), (5, 2, 7, 1), Sampling(temperature=0.0))
    tokens: list[int] = []
    for step, advance in enumerate((4, len(PROMPT) - 4, *[1] * (count - 1)), 1):
        plan = StepPlan(1, step, [1], [advance], admits=[] if step > 1 else [admit])
        tokens += ready.executor.run(plan).tokens
    return tokens


def led(loaded: LoadedModel, ready: Ready, tokens: list[int]) -> Tensor:
    """Logits of each position, computed by a worker's kernels over its own cache."""
    cache, runner = ready.executor.runner.cache, ready.executor.runner
    line = Line(tokens, [6, 1, 3, 0, 7])
    ids, batch = batch_of([(line, len(tokens))])
    with torch.inference_mode():
        hidden = loaded.model.forward(ids, cache.pool, batch, runner.kernels, cache.scales)
        return loaded.model.logits(hidden)


@pytest.mark.parametrize(("kv_scales", "tolerance"), [("static", 0.25), ("block", 0.1)])
def test_a_worker_with_8_bits_says_so_and_computes_nearly_the_same(
    folder: Path, kv_scales: str, tolerance: float
) -> None:
    plain = make_ready(asked(folder, block_size=4))
    ready = make_ready(asked(folder, kv_dtype="int8", kv_scales=kv_scales, block_size=4))
    layout = ready.hello.layout
    assert (layout.dtype, layout.scale_bytes > 0) == ("int8", kv_scales == "block")
    assert ready.hello.model_digest != plain.hello.model_digest
    assert ready.planned.kv_bytes == ready.ledger.kv_bytes == 8 * layout.bytes_per_block
    assert ready.planned.activation_bytes == plain.planned.activation_bytes
    loaded = load(folder, torch.float32, CPU)
    tokens = [*PROMPT, *greedy(plain, 7)]
    exact, near = led(loaded, plain, tokens), led(loaded, ready, tokens)
    assert 0 < (near - exact).abs().max() <= tolerance * exact.std()
    clear = exact.topk(2).values.diff(dim=-1).abs()[:, 0] > 2 * (near - exact).abs().amax(dim=-1)
    assert clear.any()
    assert torch.equal(near.argmax(dim=-1)[clear], exact.argmax(dim=-1)[clear])


@pytest.mark.parametrize("kind", ["opt", "llama"])
@pytest.mark.parametrize("kv_scales", ["static", "block"])
def test_chunks_and_blocks_change_nothing_with_8_bits(tmp_path: Path, kind: str, kv_scales: str) -> None:
    """The same tokens from a worker of another block size that gets its prompt whole, and from a second start."""
    folder = make_tiny(tmp_path / "model", kind)
    first = make_ready(asked(folder, kv_dtype="int8", kv_scales=kv_scales, block_size=8))
    again = make_ready(asked(folder, kv_dtype="int8", kv_scales=kv_scales, block_size=16))
    assert first.hello.model_digest == again.hello.model_digest
    assert greedy(first, 6) == greedy(again, 6)
