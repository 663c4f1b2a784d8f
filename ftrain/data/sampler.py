"""A shuffled order that needs no memory: a keyed permutation of [0, n), computed at any index on its own.

A stored shuffle of a trillion-token corpus is gigabytes on every rank, and a generator that must be advanced ties the order to
the history of a run. A permutation that is a pure function of (n, key, index) has neither problem: any rank, after any restart,
under any layout, asks for sequence 12,345,678 and gets the same one.

The construction is a Feistel network on the smallest power of two that holds n, with cycle walking: an index that lands outside
[0, n) is permuted again until it lands inside (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). The power
of two is less than 2n, so fewer than two rounds of walking are expected. The halves may differ by one bit and swap widths
each round; the round function is the finaliser of splitmix64. This shuffles; it does not encrypt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 8  # even, so that the halves end with the widths they began with
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SALTS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN  # one per round, wrapping
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def derive(*words: int | npt.NDArray[np.int64] | Words) -> Words:
    """A key from any number of words (seed, purpose, source, pass, ...); arrays broadcast, so a key per element is possible."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = _mix((key ^ _mix(_words(word) + _GOLDEN)) + _GOLDEN)
    return key


def permute(n: int, key: int | Words, index: npt.ArrayLike) -> Ints:
    """The images of `index` (each in [0, n)) under the permutation of [0, n) that `key` names; one key, or one per index."""
    if n < 1:
        raise ValueError(f"cannot permute {n} items")
    flat = np.atleast_1d(np.asarray(index, np.int64))
    if flat.size and (flat.min() < 0 or flat.max() >= n):
        raise IndexError(f"index {flat.min() if flat.min() < 0 else flat.max()} is outside [0, {n})")
    if n == 1:
        return np.zeros_like(flat)
    keys = np.broadcast_to(_words(key), flat.shape)
    bits = max(2, (n - 1).bit_length())
    out = _feistel(flat.view(np.uint64), keys, bits)
    while (outside := np.flatnonzero(out >= np.uint64(n))).size:
        out[outside] = _feistel(out[outside], keys[outside], bits)
    return out.view(np.int64)


def _feistel(values: Words, keys: Words, bits: int) -> Words:
    """A bijection of [0, 2**bits)."""
    low = bits // 2
    widths = (bits - low, low)
    left, right = values >> np.uint64(low), values & _mask(low)
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + _SALTS[round_])) & _mask(widths[round_ % 2]))
    return (left << np.uint64(low)) | right


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: every input bit changes about half of the output bits."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _words(value: int | npt.NDArray[np.int64] | Words) -> Words:
    """Words as an array (never a scalar: numpy warns about the wrap-around of scalars)."""
    if isinstance(value, np.ndarray):
        return np.atleast_1d(value).astype(np.uint64)
    return np.array([value], np.uint64)
