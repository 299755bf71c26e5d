"""64-bit polynomial hash of every window of a token sequence, vectorised."""

from __future__ import annotations

import numpy as np

_BASE = 0x9E3779B97F4A7C15
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


def window_hashes(token_ids: np.ndarray, window: int) -> np.ndarray:
    """Hash of `token_ids[p : p + window]` for every p: uint64 `[len - window + 1]`, empty if shorter than a window.

    The hash of 2n tokens is made of two hashes of n tokens, so the work is len * log2(window) whatever the text.
    """
    size = len(token_ids) - window + 1
    if size <= 0:
        return np.empty(0, np.uint64)
    power, length = token_ids.astype(np.uint64), 1
    power += np.uint64(1)
    power *= _SPREAD
    power ^= power >> np.uint64(32)
    result, done = None, 0
    while True:
        if window & length:
            part = power[done : done + size]
            result = part.copy() if result is None else result * _base_power(length) + part
            done += length
        if 2 * length > window:
            break
        power = power[:-length] * _base_power(length) + power[length:]
        length *= 2
    return _finish(result)


def _base_power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, _MASK + 1))


def _finish(values: np.ndarray) -> np.ndarray:
    """Spreads the entropy over the upper half, which becomes the tag."""
    values ^= values >> np.uint64(29)
    values *= _SPREAD
    return values


def tags_of(hashes: np.ndarray) -> np.ndarray:
    """The upper halves of 64-bit hashes: uint32 tags for `HashChains`."""
    return (hashes >> np.uint64(32)).astype(np.uint32)


def mix(*columns: np.ndarray) -> np.ndarray:
    """uint64 hash of the rows of some integer columns."""
    result = np.zeros(np.shape(columns[0]), np.uint64)
    for column in columns:
        result = result * np.uint64(_BASE) + np.asarray(column).astype(np.uint64) + np.uint64(1)
        result ^= result >> np.uint64(32)
        result *= _SPREAD
    result ^= result >> np.uint64(29)
    return result
