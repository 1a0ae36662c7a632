"""Where the KV of a token lies, in bytes.

Storage is block-major: one allocation per tier of shape

    [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]      (2: keys, then values)

followed, inside each block, by `scale_bytes` of scales where 8-bit KV keeps its scales in the block: float32
[num_layers, 2, num_kv_heads, block_size], one for each row of a head, in the block's last bytes. All that a block
holds is contiguous, so that a swap, a copy-on-write, a checksum and a transfer of a block are one copy each, at any
block size.
"""

from dataclasses import dataclass, replace

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
EIGHT_BITS = {"fp8": "float8_e4m3fn", "int8": "int8"}  # as the setting kv_dtype says them: as they are stored
_SCALE_BYTES = 4
_ALIGNMENT = 16  # of blocks with a scale area, in bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What both sides must know of a block: `block_size` token positions of K and V in every layer."""

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    scale_bytes: int = 0

    @property
    def values_per_block(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def bytes_per_block(self) -> int:
        return self.values_per_block * DTYPE_BYTES[self.dtype] + self.scale_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    @property
    def scales_per_block(self) -> int:
        """Rows of a head, keys and values, that each have a scale where there is a scale area."""
        return self.values_per_block // self.head_dim

    def with_scale_area(self) -> "KVLayout":
        """The same blocks with room for their own scales."""
        scales = self.scales_per_block * _SCALE_BYTES
        values = self.values_per_block * DTYPE_BYTES[self.dtype]
        return replace(self, scale_bytes=scales + -(values + scales) % _ALIGNMENT)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
