"""Norms, the activation and embeddings on the CPU: one pass over each row while it is in the nearest cache.

A thread takes R_GRAIN rows at a time, of embeddings one. Sums run in float32; each element is rounded to its type once,
when it is stored.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from kilburn.kernels.cpu.arguments import (
    E_IDS,
    E_NUM_IDS,
    E_NUM_ROWS,
    E_OUT,
    E_TABLE,
    E_TABLE_STEP,
    E_WIDTH,
    FAULT,
    R_EPS,
    R_GRAIN,
    R_HEADS,
    R_NUM_ROWS,
    R_OUT,
    R_RESIDUAL,
    R_RESIDUAL_STEP,
    R_TOKEN_STEP,
    R_WEIGHT,
    R_WIDTH,
    R_X,
    R_X_STEP,
    TAKEN,
)
from kilburn.kernels.cpu.simd import exp2, fetch_add, int64s, load_one, number, store_one
from kilburn.kernels.cpu.vectors import ELEMENT_BYTES, F32, FAST

LOG2_E = np.float32(math.log2(math.e))


def rms_norm_kernel(kind: int) -> Any:
    """rms_norm, and add_rms_norm where there is a residual."""
    element_bytes = ELEMENT_BYTES[kind]

    @njit(fastmath=FAST)
    def one_row(a, row):
        width, heads = a[R_WIDTH], a[R_HEADS]
        x, out = (
            a[R_X] + row // heads * a[R_TOKEN_STEP] + row % heads * a[R_X_STEP],
            a[R_OUT] + row * width * element_bytes,
        )
        if a[R_RESIDUAL] != 0:
            residual = a[R_RESIDUAL] + row * a[R_RESIDUAL_STEP]
            for i in range(width):
                store_one(residual, i, load_one(residual, i, kind) + load_one(x, i, kind), kind)
            x = residual
        total = np.float32(0)
        for i in range(width):
            value = load_one(x, i, kind)
            total += value * value
        mean = total / np.float32(width) + np.float32(number(a, R_EPS))
        scale = np.float32(1) / np.float32(math.sqrt(mean))
        for i in range(width):
            store_one(out, i, load_one(x, i, kind) * scale * load_one(a[R_WEIGHT], i, kind), kind)

    def rms_norm(a):
        while True:
            start = fetch_add(a, TAKEN, a[R_GRAIN])
            if start >= a[R_NUM_ROWS]:
                return
            for row in range(start, min(start + a[R_GRAIN], a[R_NUM_ROWS])):
                one_row(a, row)

    return rms_norm


def silu_mul_kernel(kind: int) -> Any:
    element_bytes = ELEMENT_BYTES[kind]

    @njit(fastmath=FAST)
    def one_row(a, row):
        width = a[R_WIDTH]
        gates, out = a[R_X] + row * a[R_TOKEN_STEP], a[R_OUT] + row * width * element_bytes
        ups = gates + width * element_bytes
        for i in range(width):
            gate, up = load_one(gates, i, kind), load_one(ups, i, kind)
            store_one(out, i, gate / (np.float32(1) + exp2(-gate * LOG2_E)) * up, kind)

    def silu_mul(a):
        while True:
            start = fetch_add(a, TAKEN, a[R_GRAIN])
            if start >= a[R_NUM_ROWS]:
                return
            for row in range(start, min(start + a[R_GRAIN], a[R_NUM_ROWS])):
                one_row(a, row)

    return silu_mul


def look_up_kernel(kind: int) -> Any:
    """out [ids, width] float32 = the rows of a table that ids name; zeros for what it has not, and a fault."""

    def look_up(a):
        while True:
            index = fetch_add(a, TAKEN, 1)
            if index >= a[E_NUM_IDS]:
                return
            row, out = int64s(a[E_IDS])[index], a[E_OUT] + index * a[E_WIDTH] * 4
            is_known = 0 <= row < a[E_NUM_ROWS]
            if not is_known:
                a[FAULT], row = 1 + index, 0
            for i in range(a[E_WIDTH]):
                value = load_one(a[E_TABLE] + row * a[E_TABLE_STEP], i, kind)
                store_one(out, i, value if is_known else np.float32(0), F32)

    return look_up
