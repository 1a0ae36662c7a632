"""A GGUF file as a folder in Hugging Face form, made once.

    model.gguf --(metadata)--> config.json, generation_config.json, tokenizer.json, tokenizer_config.json
               --(tensors)---> model.safetensors: its header first, then each tensor in slabs of rows

So the memory needed is a slab's, not the model's. Quantized tensors become float32 (exactly what the file says), or
float16 where float32 would make the file larger than LARGE_BYTES; float tensors keep their dtype. The folder is
written under a temporary name and renamed when it is whole; a lock keeps two converters of one file apart, and is
freed by the system if its holder dies.

GGUF orders the rows of Llama's q and k so that rotary pairs are neighbours; Hugging Face keeps them half a head apart.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

from kilburn.shared.gguf_header import ARCHITECTURES, ROPE_FACTORS, hub_name
from kilburn.shared.model_files import ModelRefused
from kilburn.worker.gguf_tokenizer import Metadata, read_tokenizer, write_tokenizer

OnProgress = Callable[[str, int, int], None]
LARGE_BYTES = 4 << 30
_SLAB_VALUES = 1 << 22

# What the publishers of Llama 3.1 and later stretched by; a GGUF file has only the resulting factors.
_LLAMA3_FACTORS = (8.0, 32.0)
# fmt: off
_SHAPE_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size",
})
# fmt: on


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of model.safetensors, and where it comes from."""

    name: str
    source: ReaderTensor
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    rows: "np.ndarray[Any, np.dtype[np.int64]] | None"  # the source row of each row, where the order differs

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.dtype == "F32" else 2)


def convert(source: Path, folder: Path, on_progress: OnProgress | None = None) -> Path:
    """Make `folder` from the GGUF file `source`, unless it is there. Raises ModelRefused with what to change."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "config.json").is_file():
            return folder
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _write_folder(source, partial, on_progress)
            partial.rename(folder)
        except OSError as error:
            raise ModelRefused(f"{partial}: {error.strerror}; set KILBURN_CACHE to a folder that has room") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_folder(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    try:
        reader = GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelRefused(f"{source}: not a whole GGUF file ({error}); fetch it again") from error
    try:
        outputs = plan_tensors(reader.tensors, metadata)
        config = make_config(metadata, reader.tensors)
        read = read_tokenizer(metadata)
        if len(read.tokens) > config["vocab_size"]:
            raise ModelRefused(f"the vocabulary has {len(read.tokens)} tokens, the model {config['vocab_size']}")
    except ModelRefused as refusal:
        raise ModelRefused(f"{source}: {refusal}") from refusal
    total, free = sum(output.num_bytes for output in outputs), shutil.disk_usage(folder).free
    if total > free:
        raise ModelRefused(
            f"{source}: its conversion needs {total >> 20} MiB, but {folder.parent} has {free >> 20} MiB; "
            "set KILBURN_CACHE to a folder that has room"
        )
    write_tokenizer(read, metadata, folder)
    write_safetensors(folder / "model.safetensors", outputs, total, on_progress)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


class _Shape:
    """The keys under the architecture's name."""

    def __init__(self, metadata: Metadata) -> None:
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelRefused(f"general.architecture = {self.architecture!r} is not converted; these are: {known}")
        prefix = f"{self.architecture}."
        self.values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        for key, value in self.values.items():
            if key not in _SHAPE_KEYS and value not in (0, None):
                raise ModelRefused(f"{prefix}{key} = {value!r} is not supported")

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise ModelRefused(f"{self.architecture}.{key} is missing; the file is incomplete")
        return self.values[key]

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys and values."""
        count = self.get("attention.head_count")
        kv_count = self.values.get("attention.head_count_kv", count)
        if not isinstance(count, int) or not isinstance(kv_count, int) or not 0 < kv_count <= count:
            raise ModelRefused(f"{self.architecture}.attention.head_count: layers that differ are not supported")
        return count, kv_count

    @property
    def head_dim(self) -> int:
        dim = self.values.get("attention.key_length", self.get("embedding_length") // self.heads[0])
        if self.values.get("attention.value_length", dim) != dim:
            raise ModelRefused(f"{self.architecture}.attention.value_length differs from key_length: not supported")
        if self.values.get("rope.dimension_count", dim) != dim:
            raise ModelRefused(f"{self.architecture}.rope.dimension_count must be the head's {dim}")
        return int(dim)


def _short(value: float) -> float:
    """The decimal number that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def make_config(metadata: Metadata, tensors: list[ReaderTensor]) -> dict[str, Any]:
    """config.json. Raises ModelRefused."""
    shape, by_name = _Shape(metadata), {tensor.name: tensor for tensor in tensors}
    name, model_type = ARCHITECTURES[shape.architecture]
    window = shape.values.get("attention.sliding_window")
    if window and model_type == "llama":
        name, model_type = "MistralForCausalLM", "mistral"
    elif window:
        raise ModelRefused(f"{shape.architecture}.attention.sliding_window is not supported")
    if "token_embd.weight" not in by_name:
        raise ModelRefused("token_embd.weight is missing: the file has no weights")
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": shape.get("embedding_length"),
        "intermediate_size": shape.get("feed_forward_length"),
        "num_hidden_layers": shape.get("block_count"),
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.get("context_length"),
        "rms_norm_eps": _short(shape.get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(shape, by_name.get(ROPE_FACTORS)),
        "tie_word_embeddings": "output.weight" not in by_name,
        "vocab_size": int(by_name["token_embd.weight"].shape[1]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if model_type == "mistral":
        config["sliding_window"] = window
    if model_type == "llama" and "blk.0.attn_q.bias" in by_name:
        config["attention_bias"] = True
    return config


def _rope(shape: _Shape, factors: ReaderTensor | None) -> dict[str, Any]:
    theta = _short(shape.values.get("rope.freq_base", 10000.0))
    plain = {"rope_type": "default", "rope_theta": theta}
    if factors is not None:
        return _llama3_rope(theta, shape.head_dim, np.asarray(factors.data, dtype=np.float64).reshape(-1))
    match shape.values.get("rope.scaling.type", "none"):
        case "none":
            return plain
        case "linear":
            return {**plain, "rope_type": "linear", "factor": _short(shape.get("rope.scaling.factor"))}
        case "yarn":
            original = shape.get("rope.scaling.original_context_length")
            yarn = {"factor": _short(shape.get("rope.scaling.factor")), "original_max_position_embeddings": original}
            return {**plain, "rope_type": "yarn", **yarn}
        case other:
            raise ModelRefused(
                f"{shape.architecture}.rope.scaling.type = {other!r}: only none, linear and yarn are read"
            )


def _llama3_rope(theta: float, head_dim: int, factors: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """The settings whose factors these are."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = 8192, 1.0, 4.0
    for factor in _LLAMA3_FACTORS:
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            settings = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low}
            return {**settings, "high_freq_factor": high, "original_max_position_embeddings": original}
    raise ModelRefused(f"{ROPE_FACTORS} holds factors that are not Llama 3's; use the model's safetensors")


def plan_tensors(tensors: list[ReaderTensor], metadata: Metadata) -> list[Output]:
    """What to write, in order. Raises ModelRefused for a tensor that has no place."""
    shape = _Shape(metadata)
    floats = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
    values = sum(int(tensor.n_elements) for tensor in tensors)
    unpacked = "F16" if values * 4 > LARGE_BYTES else "F32"
    outputs = []
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            continue  # computed from the settings in config.json
        name = hub_name(tensor.name)
        sizes = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        rows = None
        if shape.architecture == "llama" and (
            found := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor.name)
        ):
            rows = half_rows(sizes[0], shape.heads[found[1] == "k"])
        outputs.append(Output(name, tensor, sizes, floats.get(tensor.tensor_type, unpacked), rows))
    return sorted(outputs, key=lambda output: output.name)


def half_rows(num_rows: int, num_heads: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Source row of each row: within a head, rows 0, 2, 4 ... and then 1, 3, 5 ..."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def write_safetensors(path: Path, outputs: list[Output], total: int, on_progress: OnProgress | None) -> None:
    """The header, then every tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for output in outputs:
        end = start + output.num_bytes
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for output in outputs:
            for slab in _slabs(output):
                done += file.write(slab)
                if on_progress is not None:
                    on_progress("converting", done, total)
        file.flush()
        os.fsync(file.fileno())
    if done != total:
        raise ModelRefused(f"{path}: wrote {done} of {total} bytes; the GGUF file is damaged")


def _slabs(output: Output) -> Iterator[bytes]:
    """The tensor's bytes, some rows at a time."""
    source = output.source
    if output.dtype == "BF16":
        data = source.data.reshape(-1)  # bytes as they are
        yield data.tobytes() if output.rows is None else _bf16_rows(output)
        return
    data = source.data if len(output.shape) > 1 else source.data.reshape(1, -1)
    one_row = len(output.shape) == 1
    rows = output.rows if output.rows is not None and not one_row else np.arange(data.shape[0])
    step = max(_SLAB_VALUES // output.shape[-1], 1)
    dtype = np.float32 if output.dtype == "F32" else np.float16
    for start in range(0, len(rows), step):
        values = gguf.dequantize(data[rows[start : start + step]], source.tensor_type).astype(dtype)
        if one_row and output.rows is not None:
            values = values.reshape(-1)[output.rows]
        yield values.tobytes()


def _bf16_rows(output: Output) -> bytes:
    raw = np.ascontiguousarray(output.source.data).view(np.uint16).reshape(output.shape)
    return bytes(raw[output.rows].tobytes())
