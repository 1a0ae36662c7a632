"""From a folder to a model that runs: which decoder serves it, its weights, and the digest that names it.

The digest is what makes KV of one worker good for another. It covers everything that the KV of a token depends on
besides the tokens: the config, each tensor's name, shape and dtype, the bytes of the weight files, the revision, the
dtype that is computed in, the dtype of the KV and its scales, and the table of rotary positions. Equal in every
process. Hashing reads every byte, so the hash of a file is kept beside our other caches under its path, size and time.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, assert_never

import torch
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.shared.model_files import ModelRefused, cache_root
from kilburn.worker.models.checkpoint import Checkpoint, OnProgress, weight_files
from kilburn.worker.models.config import (
    GenericFamily,
    LlamaFamily,
    ModelConfig,
    OptFamily,
    architecture_of,
    is_own,
    read_config,
    read_settings,
)
from kilburn.worker.models.layers import Form
from kilburn.worker.models.llama import LlamaModel
from kilburn.worker.models.opt import OptModel
from kilburn.worker.parallel import Ranks

_DOMAIN = b"kilburn.model.1\0"
_READ_BYTES = 1 << 22
_WORTH_KEEPING_BYTES = 1 << 20  # a smaller file is hashed sooner than looked up


class Model(Protocol):
    """A decoder on one device. Both methods run without autograd."""

    config: ModelConfig

    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        """ids int64 [T] -> hidden [T, H]; writes each token's KV into pool [num_blocks, L, 2, Hkv, bs, D]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] of the rows that sample -> float32 [R, vocab]."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, what it is, and its name: 32 bytes that differ whenever its KV would."""

    config: ModelConfig  # of the part, where there are several ranks
    model: Model
    digest: bytes
    ranks: Ranks = field(default_factory=Ranks)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
    kv_dtype: torch.dtype | None = None,
    revision: str | None = None,
    ranks: Ranks | None = None,
    quantization: str = "none",
) -> LoadedModel:
    """The model in `folder`, computing in `dtype` on `device`. Raises ModelRefused with what to change.

    `kv_dtype` (default: dtype) and `revision` (default: the commit of a hub snapshot) enter the digest only. Of several
    `ranks` each reads its own part; their digest is that of the whole. `quantization` is for the CPU in float32.
    """
    settings, ranks, form = read_settings(folder), ranks or Ranks(), Form(device, dtype, quantization)
    config = read_config(folder) if is_own(architecture_of(settings)) else None
    with Checkpoint(folder, on_progress) as weights:
        if config is not None:
            match config.family:
                case LlamaFamily() as family:
                    model: Model = LlamaModel(config, family, weights, form, ranks)
                case OptFamily() as family:
                    model = OptModel(config, family, weights, form, ranks)
                case GenericFamily():
                    raise ModelRefused(f"{folder}: {config.architecture} has no decoder here")
                case _:
                    assert_never(config.family)
        elif quantization != "none":
            raise ModelRefused(f"--quantization: {architecture_of(settings)} is computed by its own code; give none")
        else:
            # Here and not above: it brings transformers, seconds that our own decoders do not need.
            import kilburn.worker.models.generic as generic

            model = generic.load(folder, settings, weights, device, dtype)
        digest = model_digest(
            folder, settings.values, weights, model.config, form, kv_dtype or dtype, revision, on_progress
        )
    return LoadedModel(model.config, model, digest, ranks)


def model_digest(
    folder: Path,
    settings: object,
    weights: Checkpoint,
    config: ModelConfig,
    form: Form,
    kv_dtype: torch.dtype,
    revision: str | None,
    on_progress: OnProgress | None,
) -> bytes:
    """SHA-256 over a canonical encoding of all that KV depends on besides tokens."""
    files = weight_files(folder)
    total, done, hashes = sum(file.stat().st_size for file in files), 0, []
    for file in files:
        hashes.append([file.name, file_hash(file, on_progress, done, total)])
        done += file.stat().st_size
    if revision is None and folder.parent.name == "snapshots":
        revision = folder.name
    facts = {
        "config": settings,
        "tensors": sorted([name, info.dtype, *info.shape] for name, info in weights.tensors.items()),
        "files": hashes,
        "revision": revision,
        "dtype": str(form.dtype),
        "weights": None if form.quantization == "none" else form.quantization,
        "kv": {"dtype": str(kv_dtype), "scales": None},
        "rope": repr(config.family.rope) if isinstance(config.family, LlamaFamily) else None,
        "max_len": config.max_len,
    }
    encoded = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return hashlib.sha256(_DOMAIN + encoded).digest()


def file_hash(file: Path, on_progress: OnProgress | None = None, done: int = 0, total: int = 0) -> str:
    """SHA-256 of a file in hex, from the cache if its path, size and time are those of the last reading."""
    real = file.resolve()
    stat = real.stat()
    key = {"path": str(real), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    place = cache_root() / "hashes" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:24]}.json"
    try:
        kept = json.loads(place.read_text())
        if {name: kept[name] for name in key} == key and len(bytes.fromhex(kept["sha256"])) == 32:
            return str(kept["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or spoilt: it is only a cache, and is written anew below
    state = hashlib.sha256()
    with real.open("rb") as source:
        while piece := source.read(_READ_BYTES):
            state.update(piece)
            done += len(piece)
            if on_progress is not None:
                on_progress("hashing weights", done, max(total, done))
    if stat.st_size >= _WORTH_KEEPING_BYTES:
        _keep(place, {**key, "sha256": state.hexdigest()})
    return state.hexdigest()


def _keep(place: Path, value: dict[str, object]) -> None:
    """Whole or not at all; a cache that cannot be written costs time, not the start."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, place)
    except OSError:
        return
