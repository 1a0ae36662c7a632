"""Random numbers that are a function of where they are used: (seed, stream, position) -> [0, 1).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of multiply and
exchange turn a counter and a key into 128 bits that pass the known batteries. There is no state, so a draw does not
depend on who else is in the batch, on how many draws came before, or on which life of a row makes it.

    key      seed        (64 bits)
    counter  position    (64 bits)   of the token being drawn
             stream      (32 bits)   tells the samples of a group apart
             0           (32 bits)   room for a second use of the same place

A step needs one number per draw. Here they are vectorised numpy; the Triton set turns where it draws.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLY_0, _MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """The four 32-bit words of each lane, held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Words, streams: Words, positions: Words) -> NDArray[np.float64]:
    """One number in [0, 1) per lane, with 53 random bits. All arguments uint64 [n]."""
    counter = (positions & _LOW, positions >> _HALF, streams & _LOW, np.zeros_like(positions))
    high, low, *_ = philox4x32(counter, (seeds & _LOW, seeds >> _HALF))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
