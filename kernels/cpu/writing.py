"""RoPE and the write of new KV on the CPU, in one pass over the tokens; and the moves of whole blocks.

A token's q is turned in place, its k on the way into the cache, its v is only copied. Its slot says where: block and
offset in 64 bits. A slot below 0 is padding and written nowhere.

A cache of int8 takes k and v divided by their scale: that of their head or, where blocks have a scale area, their own,
which is found first and written there.
"""

from typing import Any

import numpy as np
from numba import njit

from kilburn.kernels.cpu.arguments import (
    FAULT,
    M_BLOCK_BYTES,
    M_NUM_PIECES,
    M_PAIRS,
    M_PER_BLOCK,
    M_PIECE,
    M_SOURCE,
    M_SOURCE_STEP,
    M_TO,
    M_TO_STEP,
    TAKEN,
    W_BLOCK_SIZE,
    W_BLOCK_STEP,
    W_COS_SIN,
    W_HEAD_DIM,
    W_HEAD_STEP,
    W_INTERLEAVED,
    W_K,
    W_K_HEAD,
    W_K_TOKEN,
    W_KV,
    W_NUM_HEADS,
    W_NUM_KV_HEADS,
    W_NUM_POSITIONS,
    W_NUM_SLOTS,
    W_NUM_TOKENS,
    W_POSITIONS,
    W_Q,
    W_Q_HEAD,
    W_Q_TOKEN,
    W_ROTARY_DIM,
    W_SCALE_BLOCK,
    W_SCALE_HEAD,
    W_SCALE_VALUE,
    W_SCALES,
    W_SLOTS,
    W_V,
    W_V_HEAD,
    W_V_TOKEN,
    W_VALUE_STEP,
)
from kilburn.kernels.cpu.simd import copy_bytes, fetch_add, floats, int64s, load_one, store_one
from kilburn.kernels.cpu.vectors import ELEMENT_BYTES, FAST, INT8

LARGEST = np.float32(127)  # of int8, as scales are made


def kv_write_kernel(kind: int, stored: int) -> Any:
    """The kernel for q, k and v of one kind and a cache of the same, or of int8."""
    element_bytes, stored_bytes, is_int8 = ELEMENT_BYTES[kind], ELEMENT_BYTES[stored], stored == INT8

    @njit(fastmath=FAST)
    def turn(a, source, to, cos_sin):
        """One head from `source` to `to`, which may be the same place."""
        half = a[W_ROTARY_DIM] // 2
        if cos_sin == 0:
            half = 0
        cos, sin = floats(cos_sin), floats(cos_sin + 4 * half)
        if a[W_INTERLEAVED] != 0:
            for i in range(half):
                first, second = load_one(source, 2 * i, kind), load_one(source, 2 * i + 1, kind)
                store_one(to, 2 * i, first * cos[i] - second * sin[i], kind)
                store_one(to, 2 * i + 1, second * cos[i] + first * sin[i], kind)
        else:
            for i in range(half):
                first, second = load_one(source, i, kind), load_one(source, half + i, kind)
                store_one(to, i, first * cos[i] - second * sin[i], kind)
                store_one(to, half + i, second * cos[i] + first * sin[i], kind)
        if source != to:
            rest = 2 * half * element_bytes
            copy_bytes(to + rest, source + rest, a[W_HEAD_DIM] * element_bytes - rest)

    @njit(fastmath=FAST)
    def quantize(a, source, to, scale_at):
        """One row of int8, by the scale at an address: its head's, or its own, that is written there."""
        scale, dim = floats(scale_at), a[W_HEAD_DIM]
        if a[W_SCALE_BLOCK] != 0:
            top, nothing = np.float32(0), np.float32(0)
            for i in range(dim):
                value = abs(load_one(source, i, kind))
                top = max(top, value)
                nothing += value * np.float32(0)  # NaN where a value is not finite, and so is the scale then
            scale[0] = top / LARGEST + nothing
        share = np.float32(0)
        if scale[0] != np.float32(0):
            share = np.float32(1) / scale[0]
        for i in range(dim):
            store_one(to, i, load_one(source, i, kind) * share, stored)

    @njit
    def keep(a, token, head, block, offset, cos_sin):
        """The key and the value of one head to their slot."""
        row_bytes = a[W_HEAD_DIM] * stored_bytes
        to = a[W_KV] + block * a[W_BLOCK_STEP] + head * a[W_HEAD_STEP] + offset * row_bytes
        key = a[W_K] + token * a[W_K_TOKEN] + head * a[W_K_HEAD]
        value = a[W_V] + token * a[W_V_TOKEN] + head * a[W_V_HEAD]
        if is_int8:
            turn(a, key, key, cos_sin)
            scale = a[W_SCALES] + block * a[W_SCALE_BLOCK] + head * a[W_SCALE_HEAD]
            if a[W_SCALE_BLOCK] != 0:
                scale += 4 * offset
            quantize(a, key, to, scale)
            quantize(a, value, to + a[W_VALUE_STEP], scale + a[W_SCALE_VALUE])
        else:
            turn(a, key, to, cos_sin)
            copy_bytes(to + a[W_VALUE_STEP], value, row_bytes)

    @njit
    def one_token(a, token):
        position, slot = int64s(a[W_POSITIONS])[token], int64s(a[W_SLOTS])[token]
        cos_sin = 0
        if a[W_COS_SIN] != 0:
            if position < 0 or position >= a[W_NUM_POSITIONS]:
                a[FAULT] = 1 + token
                return
            cos_sin = a[W_COS_SIN] + position * a[W_ROTARY_DIM] * 4
            for head in range(a[W_NUM_HEADS]):
                q = a[W_Q] + token * a[W_Q_TOKEN] + head * a[W_Q_HEAD]
                turn(a, q, q, cos_sin)
        if slot < 0:
            return
        if slot >= a[W_NUM_SLOTS]:
            a[FAULT] = 1 + token
            return
        for head in range(a[W_NUM_KV_HEADS]):
            keep(a, token, head, slot // a[W_BLOCK_SIZE], slot % a[W_BLOCK_SIZE], cos_sin)

    def kv_write(a):
        while True:
            start = fetch_add(a, TAKEN, 16)
            if start >= a[W_NUM_TOKENS]:
                return
            for token in range(start, min(start + 16, a[W_NUM_TOKENS])):
                one_token(a, token)

    return kv_write


def move_blocks_kernel(_kind: int) -> Any:
    """Copies blocks from pool to pool, in pieces of M_PIECE bytes that the threads share."""

    def move_blocks(a):
        while True:
            index = fetch_add(a, TAKEN, 1)
            if index >= a[M_NUM_PIECES]:
                return
            pair, at = index // a[M_PER_BLOCK], index % a[M_PER_BLOCK] * a[M_PIECE]
            source, to = int64s(a[M_PAIRS])[2 * pair], int64s(a[M_PAIRS])[2 * pair + 1]
            num_bytes = min(a[M_PIECE], a[M_BLOCK_BYTES] - at)
            copy_bytes(a[M_TO] + to * a[M_TO_STEP] + at, a[M_SOURCE] + source * a[M_SOURCE_STEP] + at, num_bytes)

    return move_blocks
