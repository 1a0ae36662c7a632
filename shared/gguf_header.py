"""What the header of a GGUF file says of a model: its settings, and its tensors by their Hugging Face names.

    "GGUF" version num_tensors num_settings | settings: name kind value ... | tensors: name sizes kind offset ... | data

Read as far as the tensors and no further, without the package that reads the data; lists (the vocabulary) are passed
over. What the architectures and tensors are called there and here is told in this file, for the conversion as well.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kilburn.shared.model_files import ModelRefused

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
ROPE_FACTORS = "rope_freqs.weight"  # no parameters: they are computed from the settings
# The last two parts of a layer's tensor names, there and here.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hub_name(name: str) -> str:
    """What Hugging Face calls a tensor. Raises ModelRefused for one that has no place."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _LAYER_NAMES:
        raise ModelRefused(f"the tensor {name} has no place in this architecture")
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """As much of it as a model's sizes depend on."""

    config: dict[str, Any]  # the keys of a config.json that are about sizes
    tensors: dict[str, tuple[int, ...]]


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 24
_MOST_CHARACTERS = 1 << 24


class _Reader:
    """Little-endian values, one after the other. Raises ValueError where the file ends or makes no sense."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize(code)))[0]

    def count(self, most: int) -> int:
        value = int(self.number("Q"))
        if value > most:
            raise ValueError(f"a count of {value}")
        return value

    def text(self) -> str:
        return self._bytes(self.count(_MOST_CHARACTERS)).decode("utf-8", "replace")

    def value(self) -> Any:
        """A setting's value; None for a list."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            self._pass_over()
            return None
        return self.number(_scalar(kind))

    def _pass_over(self) -> None:
        kind, count = self.number("I"), self.count(_MOST_ENTRIES)
        if kind == _STRING:
            for _ in range(count):
                self._skip(self.count(_MOST_CHARACTERS))
            return
        self._skip(count * struct.calcsize(_scalar(kind)))

    def _skip(self, num_bytes: int) -> None:
        if self._file.tell() + num_bytes > self._size:
            raise ValueError("it ends before its header does")
        self._file.seek(num_bytes, 1)

    def _bytes(self, num_bytes: int) -> bytes:
        found = self._file.read(num_bytes)
        if len(found) != num_bytes:
            raise ValueError("it ends before its header does")
        return found


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of the unknown kind {kind}")
    return _SCALARS[kind]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ModelRefused with what to change."""
    try:
        with path.open("rb") as file:
            settings, tensors = _read(_Reader(file, path.stat().st_size))
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelRefused(f"{path}: not a whole GGUF file ({error}); fetch it again") from error
    try:
        named = {hub_name(name): shape for name, shape in tensors.items() if name != ROPE_FACTORS}
        return GgufHeader(_config(settings, named), named)
    except ModelRefused as refusal:
        raise ModelRefused(f"{path}: {refusal}") from refusal


def _read(source: _Reader) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    if source.number("4s") != b"GGUF" or source.number("I") not in (2, 3):
        raise ValueError("it does not begin as one of version 2 or 3 does")
    num_tensors, num_settings = source.count(_MOST_ENTRIES), source.count(_MOST_ENTRIES)
    settings = {}
    for _ in range(num_settings):
        name = source.text()
        settings[name] = source.value()
    tensors = {}
    for _ in range(num_tensors):
        name, num_sizes = source.text(), int(source.number("I"))
        if num_sizes > 4:
            raise ValueError(f"{name} has {num_sizes} dimensions")
        # The innermost comes first there, and last here.
        tensors[name] = tuple(source.number("Q") for _ in range(num_sizes))[::-1]
        source.number("I"), source.number("Q")  # its kind, and where its data begin
    return settings, tensors


def _config(settings: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    architecture = str(settings.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelRefused(f"general.architecture = {architecture!r} is not converted; these are: {known}")

    def get(key: str) -> Any:
        value = settings.get(f"{architecture}.{key}")
        if value is None:
            raise ModelRefused(f"{architecture}.{key} is missing; the file is incomplete")
        return value

    def ask(key: str) -> Any:
        return settings.get(f"{architecture}.{key}")

    embedding = tensors.get("model.embed_tokens.weight", ())
    if len(embedding) != 2:
        raise ModelRefused("token_embd.weight is missing: the file has no weights")
    config = {
        "architectures": [ARCHITECTURES[architecture][0]],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": ask("attention.head_count_kv"),
        "head_dim": ask("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": embedding[0],
    }
    if ask("rope.scaling.type") == "yarn":
        original = get("rope.scaling.original_context_length")
        yarn = {"factor": get("rope.scaling.factor"), "original_max_position_embeddings": original}
        config["rope_parameters"] = {"rope_type": "yarn", **yarn}
    return config
