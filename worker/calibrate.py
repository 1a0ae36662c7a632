"""Scales of 8-bit KV that stay what they are: found once, at load, by running the model over fixed sequences of ids.

    NUM_SEQUENCES x LENGTH ids, the same on every machine -> model, its KV as it is computed
                                                              | the largest |k|, |v| of each layer and KV head
                                                              v
            x MARGIN / LARGEST[dtype], up to the next STEPS_PER_OCTAVE-th of an octave -> float32 [layers, 2, kv_heads]

The ids are scattered over the vocabulary: a worker has no tokenizer, and needs none for this. Text reaches further than
they do in some heads, which MARGIN is for; what lies beyond is cut off. The kernels are the reference: scales belong to
a model, not to a set of kernels. Sums differ in their last digits from machine to machine all the same, and so scales
are rounded to a coarse step, and what was found is kept beside our other caches under the model's digest: a folder
that is copied there makes two machines agree. The scales enter the digest that a worker says, and so two workers that
disagree share no names.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import LARGEST
from kilburn.kernels.dispatch import Batch
from kilburn.shared.layout import KVLayout
from kilburn.shared.model_files import cache_root
from kilburn.worker.models.weights import LoadedModel

NUM_SEQUENCES = 8
LENGTH = 128  # ids of each; as many as the model has positions where these are fewer
MARGIN = 1.5
STEPS_PER_OCTAVE = 8
SMALLEST = 2.0**-40  # of a head that is zero throughout

_DOMAIN = b"kilburn.kv.1\0"
_VERSION = 1  # of what is kept; goes up with any constant above

OnProgress = Callable[[str, int, int], None]


def digest_with(model_digest: bytes, layout: KVLayout, scales: Tensor | None) -> bytes:
    """What names the KV of a model: its digest where KV has no scales, else that and how it is scaled."""
    if scales is not None:
        how = json.dumps(scales.tolist()).encode()
    elif layout.scale_bytes:
        how = b"block"
    else:
        return model_digest
    return hashlib.sha256(_DOMAIN + model_digest + how).digest()


def static_scales(
    loaded: LoadedModel,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """float32 [layers, 2, kv_heads], on the host. `loaded` computes in `dtype` on `device`, and its digest knows
    `kv_dtype`. Measured once for each digest."""
    config = loaded.config
    kept = kept_scales(loaded.digest, (config.num_layers, 2, config.num_kv_heads))
    if kept is None:
        kept = scales_for(largest_seen(loaded, dtype, device, on_progress), kv_dtype)
        _keep(_place(loaded.digest), kept)
    return kept


def _place(model_digest: bytes) -> Path:
    return cache_root() / "kv-scales" / f"{model_digest.hex()}.json"


def scales_for(largest: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """The scale of each head whose largest size is known."""
    needed = (largest.double() * (MARGIN / LARGEST[kv_dtype])).clamp(min=SMALLEST)
    return torch.exp2(torch.ceil(torch.log2(needed) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE).float()


def fixed_ids(sequence: int, length: int, vocab_size: int) -> list[int]:
    """The ids that one sequence has on every machine."""
    return [(7919 * sequence + 104729 * (sequence + 1) * place + place * place) % vocab_size for place in range(length)]


@torch.inference_mode()
def largest_seen(
    loaded: LoadedModel, dtype: torch.dtype, device: torch.device, on_progress: OnProgress | None = None
) -> Tensor:
    """float32 [layers, 2, kv_heads]: the largest size of a key and of a value of each head, on the host."""
    config = loaded.config
    length = min(LENGTH, config.max_len)
    # One block that holds a whole sequence: the reference takes any size.
    shape = (1, config.num_layers, 2, config.num_kv_heads, length, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    places = torch.arange(length, device=device)

    def whole(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    batch = Batch(whole(0, length), whole(length), whole(0).unsqueeze(0), places, places, length, length)
    largest = torch.zeros(shape[1:4])
    for sequence in range(NUM_SEQUENCES):
        if on_progress is not None:
            on_progress("measuring KV", sequence, NUM_SEQUENCES)
        ids = torch.tensor(fixed_ids(sequence, length, config.vocab_size), device=device)
        loaded.model.forward(ids, pool, batch, reference)
        largest = torch.maximum(largest, pool[0].abs().amax(dim=(3, 4)).float().cpu())
    return largest.nan_to_num(1.0, posinf=1.0)  # such a model fails its requests, with or without 8 bits


def kept_scales(model_digest: bytes, shape: tuple[int, ...]) -> Tensor | None:
    """Scales of an earlier start, if they are whole and could be such."""
    try:
        found = json.loads(_place(model_digest).read_text())
        scales = torch.tensor(found["scales"], dtype=torch.float32)
        is_ours = found["version"] == _VERSION
    except (OSError, ValueError, TypeError, KeyError):
        return None  # absent or spoilt: it is only a cache, and is written anew
    if not is_ours or scales.shape != shape or not bool((scales.isfinite() & (scales > 0)).all()):
        return None
    return scales


def _keep(place: Path, scales: Tensor) -> None:
    """Whole or not at all; a cache that cannot be written costs time, not the start."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            json.dump({"version": _VERSION, "scales": scales.tolist()}, file)
        os.replace(file.name, place)
    except OSError:
        return
