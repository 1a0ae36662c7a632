"""How long a step takes on a device: the larger of what it computes and what it reads, part by part.

    products    max(2 x weights x positions / flops,      weights' bytes / bandwidth)
    attention   max(4 x layers x heads' width x pairs / flops,  KV bytes read and written / bandwidth)
    + all-reduces between ranks, two a layer: 2 (r - 1) / r of the activations over the links, and their latency
    + what layers and steps cost whatever they compute
    + moves of blocks to and from the host, over its link

"weights" are those of a rank's matrix products. A row of the batch is either a chunk of known tokens or goes on by one;
`Load` is all that a step's seconds depend on. `Linear` is the same for a machine whose prices were fitted to its own
steps (bench/calibrate.py). Nothing here is fitted to what anybody published about a serving system.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from kilburn.controller.simulate.devices import Device, Reach
from kilburn.shared.layout import DTYPE_BYTES, KVLayout
from kilburn.shared.model_shape import Build, ModelShape


@dataclass(slots=True)
class Load:
    """What one step holds."""

    num_rows: int = 0  # that go on by one position
    num_cells: int = 0  # positions that these attend to, all together
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    num_pairs: int = 0  # of a chunk's token and a position that it attends to
    num_chunk_cells: int = 0  # positions that chunks attend to, each once a chunk
    num_sampled: int = 0  # rows whose logits are made
    num_moved: int = 0  # blocks, to the host or from it
    num_copied: int = 0  # blocks, on the device

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_chunk_tokens


class Machine(Protocol):
    """Seconds of a step: (of its moves, of all else)."""

    def seconds(self, load: Load) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """Prices in seconds."""

    fixed_s: float = 0.0
    row_s: float = 0.0
    cell_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    move_s: float = 0.0

    def seconds(self, load: Load) -> tuple[float, float]:
        computed_s = self.row_s * load.num_rows + self.cell_s * load.num_cells
        computed_s += self.token_s * load.num_chunk_tokens + self.pair_s * load.num_pairs
        is_idle = not load.num_tokens
        return self.move_s * (load.num_moved + load.num_copied), 0.0 if is_idle else self.fixed_s + computed_s


class Roofline:
    """See the file's head. `shape` and `layout` are of one of `ranks` equal ranks."""

    def __init__(
        self, device: Device, reach: Reach, shape: ModelShape, layout: KVLayout, dtype: str, ranks: int
    ) -> None:
        size, width = DTYPE_BYTES[dtype], shape.num_heads * shape.head_dim
        self._flops = device.flops * reach.flops
        self._bandwidth = device.bandwidth * reach.bandwidth
        self._layer_weights = shape.num_layers * layer_weights(shape)
        self._head_weights = -(-shape.vocab_size // ranks) * shape.hidden
        self._weight_bytes = (self._layer_weights + self._head_weights) * size
        self._pair_flops = 4 * shape.num_layers * width
        self._cell_bytes = layout.bytes_per_token
        self._attention_bandwidth = device.bandwidth * reach.attention(layout.block_size)
        self._block_bytes = layout.bytes_per_block
        self._host_link, self._move_s = device.host_link * reach.host_link, reach.move_s
        self._reduced_s = (
            2 * shape.num_layers * 2 * (ranks - 1) / ranks * shape.hidden * size / (device.link * reach.link)
        )
        self._fixed_s = reach.step_s + shape.num_layers * (reach.layer_s + (2 * reach.reduce_s if ranks > 1 else 0.0))

    def seconds(self, load: Load) -> tuple[float, float]:
        moves_s = load.num_moved * (self._move_s + self._block_bytes / self._host_link)
        moves_s += load.num_copied * 2 * self._block_bytes / self._bandwidth
        tokens = load.num_tokens
        if not tokens:
            return moves_s, 0.0
        products = 2 * (self._layer_weights * tokens + self._head_weights * load.num_sampled)
        products_s = max(products / self._flops, self._weight_bytes / self._bandwidth)
        cells = load.num_cells + load.num_chunk_cells + tokens
        attended = self._pair_flops * (load.num_cells + load.num_pairs)
        attention_s = max(attended / self._flops, cells * self._cell_bytes / self._attention_bandwidth)
        return moves_s, self._fixed_s + products_s + attention_s + tokens * self._reduced_s

    def steady(self, load: Load) -> Iterator[float]:
        """As `steady`, of those parts only that change from step to step."""
        num_rows, cells = load.num_rows, load.num_cells
        products = 2 * (self._layer_weights * num_rows + self._head_weights * load.num_sampled)
        first_s = self._fixed_s + max(products / self._flops, self._weight_bytes / self._bandwidth)
        reduced_s, flops, bandwidth = num_rows * self._reduced_s, self._flops, self._attention_bandwidth
        pair_flops, cell_bytes = self._pair_flops, self._cell_bytes
        while True:
            computed_s, read_s = pair_flops * cells / flops, (cells + num_rows) * cell_bytes / bandwidth
            yield first_s + (computed_s if computed_s > read_s else read_s) + reduced_s
            cells += num_rows


def steady(machine: Machine, load: Load) -> Iterator[float]:
    """The seconds of one step after another in which the same rows go on, the first of which is `load`."""
    if isinstance(machine, Roofline):
        yield from machine.steady(load)
    while True:
        yield machine.seconds(load)[1]
        load.num_cells += load.num_rows


def layer_weights(shape: ModelShape) -> int:
    """Values in the matrix products of one layer of a rank."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    num_products = 2 if shape.build in (Build.PLAIN_NORM_FIRST, Build.PLAIN_NORM_LAST) else 3
    return shape.hidden * (2 * q + 2 * kv + num_products * shape.intermediate)


# --- models whose files are not here

_OPT, _GATED = Build.PLAIN_NORM_FIRST, Build.GATED
# layers, hidden, intermediate, heads, KV heads, vocabulary, longest, build: from the models' published config.json
_SIZES: dict[str, tuple[int, int, int, int, int, int, int, Build]] = {
    "opt-13b": (40, 5120, 20480, 40, 40, 50272, 2048, _OPT),
    "opt-66b": (64, 9216, 36864, 72, 72, 50272, 2048, _OPT),
    "opt-175b": (96, 12288, 49152, 96, 96, 50272, 2048, _OPT),
    "llama-2-7b": (32, 4096, 11008, 32, 32, 32000, 4096, _GATED),
    "llama-2-13b": (40, 5120, 13824, 40, 40, 32000, 4096, _GATED),
    "llama-2-70b": (80, 8192, 28672, 64, 8, 32000, 4096, _GATED),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, 131072, _GATED),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128256, 131072, _GATED),
    "mistral-7b": (32, 4096, 14336, 32, 8, 32768, 32768, _GATED),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, 32768, _GATED),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064, 32768, _GATED),
}
KNOWN_MODELS = tuple(_SIZES)


def known_shape(name: str, dtype: str, ranks: int) -> ModelShape | None:
    """A rank's part of a model of the table; None where it has none of that name, or it cannot be split so."""
    if name not in _SIZES:
        return None
    layers, hidden, intermediate, heads, kv_heads, vocabulary, longest, build = _SIZES[name]
    if heads % ranks or intermediate % ranks or (kv_heads % ranks and ranks % kv_heads):
        return None
    mine = (intermediate // ranks, heads // ranks, max(kv_heads // ranks, 1), hidden // heads)
    part = ModelShape(layers, hidden, *mine, vocabulary, 0, max_len=longest, build=build)
    is_opt = build is _OPT
    tables = (1 if is_opt else 2) * vocabulary * hidden / ranks + (longest * hidden if is_opt else 0)
    weights = layers * layer_weights(part) + tables
    return replace(part, weight_bytes=int(weights * DTYPE_BYTES[dtype]))
