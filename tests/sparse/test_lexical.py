"""Which blocks repeat the last tokens, against a search in plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucm_ray.sparse.lexical import followers


def by_hand(ids: list[int], block_size: int, count: int, start: int, stop: int) -> list[int]:
    last = len(ids) - 1
    found = []
    for place in range(last):
        if ids[place] != ids[last]:
            continue
        length = 1
        while length < 8 and place - length >= 0 and ids[place - length] == ids[last - length]:
            length += 1
        found.append((-length, -place))
    blocks = []
    for _, place in sorted(found):
        block = (1 - place) // block_size
        if start <= block < stop and block not in blocks:
            blocks.append(block)
    return blocks[:count]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 7), st.integers(0, 6), st.integers(0, 5),
       st.integers(0, 30))
def test_the_same_blocks_as_a_search_by_hand(ids, block_size, count, start, stop):
    found = followers(np.asarray(ids, np.int32), block_size, count, start, stop)
    assert found.tolist() == by_hand(ids, block_size, count, start, stop)


def test_the_longer_match_comes_before_the_later_one():
    #      0  1  2  3   4  5  6  7   8  9 10 11  12 13
    ids = [1, 2, 3, 9,  0, 0, 3, 8,  0, 0, 0, 0,  2, 3]
    assert followers(np.asarray(ids), 4, 8, 0, 4).tolist() == [0, 1]
