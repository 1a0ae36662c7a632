"""All copies of whole blocks that a step asks for, in one launch.

    pairs [n, 2]             (3 -> 9)               (7 -> 2)
    a block, in words     | tile | tile | .. |   | tile | tile | .. |
    grid                    (0,0)  (0,1)           (1,0)  (1,1)

A block is one contiguous piece, all layers of it, and is copied as the widest words that fit, whatever it holds. Block
ids are 64 bits wide before they meet a stride. A pool in pinned host memory may be on either side.
"""

import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_pools, said
from kilburn.kernels.triton.launch import Launch
from kilburn.kernels.triton.words import in_words

TILE = 2048


@triton.jit
def _copy_blocks_kernel(
    source_ptr,  # [blocks, words of a block]
    destination_ptr,  # alike, of as many blocks as it has
    pairs_ptr,  # [n, 2]: source, destination
    num_words,
    stride_source,  # words from block to block
    stride_destination,
    WORDS: tl.constexpr,
):
    i_pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * i_pair).to(tl.int64)
    destination = tl.load(pairs_ptr + 2 * i_pair + 1).to(tl.int64)
    o_word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    m_word = o_word < num_words
    b_words = tl.load(source_ptr + source * stride_source + o_word, mask=m_word)
    tl.store(destination_ptr + destination * stride_destination + o_word, b_words, mask=m_word)


def copy_blocks(source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> Launch:
    """destination_pool[destination] = source_pool[source]. pairs int64 [n, 2] on the device; its ids are the caller's
    to check, since to look at them here would wait for the device."""
    check_pools(source_pool, destination_pool)
    if pairs.dim() != 2 or pairs.shape[1] != 2 or str(pairs.dtype) != "torch.int64" or not pairs.is_contiguous():
        raise ValueError(f"pairs {said(pairs)}: want int64 [n, 2], contiguous")
    source, destination = in_words(source_pool), in_words(destination_pool)
    num_words = source[0].numel() if len(source) else 0
    return Launch(
        kernel=_copy_blocks_kernel,
        grid=(len(pairs), -(-num_words // TILE)),
        arguments=(source, destination, pairs, num_words, source.stride(0), destination.stride(0)),
        constants={"WORDS": TILE},
        num_warps=8,
        num_stages=1,
    )
