"""What comes again is worth storing at once."""

from __future__ import annotations

from ucm_ray.blend.met_text import CAPACITY, MetText


def turn(number: int) -> frozenset[str]:
    return frozenset(f"turn {number}, chunk {index}" for index in range(5))


def test_text_is_worth_it_when_it_comes_again():
    met = MetText()
    assert not met.meet(turn(0))
    assert not met.meet(turn(1))
    assert met.meet(turn(0))
    assert not met.meet(turn(2))


def test_where_turns_come_again_new_ones_are_worth_it_at_once():
    met = MetText()
    worth = []
    for number in range(10):
        worth.append(met.meet(turn(number)))
        met.note_reused(turn(number))  # the next prompt's history
    assert worth[:2] == [False, False] and all(worth[2:])


def test_where_nothing_comes_again_nothing_is():
    met = MetText()
    for number in range(10):
        met.meet(turn(number))
        met.note_reused(turn(number))
    worth = [met.meet(turn(number)) for number in range(10, 100)]
    assert not any(worth[10:])


def test_text_that_was_ingested_and_never_met_says_nothing():
    met = MetText()
    for number in range(100, 200):
        met.note_reused(turn(number))
    assert not met.meet(turn(0))


def test_old_text_is_forgotten():
    met = MetText()
    met.meet(turn(0))
    met.meet(frozenset(map(str, range(CAPACITY))))
    assert not met.meet(turn(0))
    met.clear()
    assert not met.meet(turn(0))
