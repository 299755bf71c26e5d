"""Blocks that repeat what is being said: the lexical share of a selection.

Some heads look for the place where the last tokens stood before, to read what followed there (induction heads, Olsson
et al. 2022). Where they look changes with every token, so a selection made for the queries of earlier steps misses it;
but the token ids alone say where it is, before the first layer of the step.
"""

from __future__ import annotations

import numpy as np

_LONGEST_MATCH = 8


def followers(token_ids: np.ndarray, block_size: int, count: int, start: int, stop: int) -> np.ndarray:
    """Blocks that hold what followed earlier occurrences of the last tokens, best first.

    Args:
        token_ids: integers `[num_tokens]`, the token that is being processed last.
        count: at most that many blocks.
        start, stop: only blocks of `[start, stop)`.

    Returns:
        int64 `[at most count]`, without repetition: longest match of preceding tokens first (up to 8), then the latest.
    """
    last = len(token_ids) - 1
    # what followed an occurrence at p stands at p + 1
    low, high = max(start * block_size - 1, 0), min(stop * block_size - 1, last)
    if low >= high:
        return np.zeros(0, np.int64)
    places = low + np.flatnonzero(token_ids[low:high] == token_ids[last])
    lengths = np.ones(len(places), np.int64)
    alive = places
    for back in range(1, min(_LONGEST_MATCH, last + 1)):
        alive = alive[alive >= back]
        alive = alive[token_ids[alive - back] == token_ids[last - back]]
        if not len(alive):
            break
        lengths[np.searchsorted(places, alive)] += 1
    blocks = ((places + 1) // block_size)[np.lexsort((-places, -lengths))]
    _, first = np.unique(blocks, return_index=True)
    return blocks[np.sort(first)][:count]
