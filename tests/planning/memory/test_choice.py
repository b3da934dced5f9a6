"""The choice is the cheapest of all that fit: equal to trying them all."""

from __future__ import annotations

import math

import pytest

from tests.planning.memory.drawn_walks import all_choices, drawn_walk, replayed
from tiledseg.planning.memory import best, bound
from tiledseg.planning.memory.best import choose
from tiledseg.planning.walk import parts
from tiledseg.planning.walk.items import price


@pytest.mark.parametrize("seed", range(40))
def test_prices_are_those_of_a_replay(seed: int) -> None:
    walk = drawn_walk(seed, most=6)
    for choices in all_choices(walk):
        cost = price(walk, choices)
        assert (cost.seconds, cost.peak) == replayed(walk, choices)


@pytest.mark.parametrize("seed", range(240))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    """For five budgets, from one that nothing fits to one that all fits; seconds to the last bit: they are quarters."""
    walk = drawn_walk(1000 + seed)
    priced = [price(walk, choices) for choices in all_choices(walk)]
    peaks = sorted({each.peak for each in priced})
    for budget in (peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) * 2 // 3], peaks[-1]):
        fitting = [each.seconds for each in priced if each.peak <= budget]
        found = choose(walk, budget)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert found.peak <= budget
        assert (found.seconds, found.peak) == replayed(walk, found.choices)
        assert found.seconds == min(fitting)
        assert found.proven
        assert found.gap == 0


@pytest.mark.parametrize("seed", range(60))
def test_parts_lose_no_choice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each link is split, however near: what no part's bound may hide is found."""
    monkeypatch.setattr(parts, "NEAR", 0)
    monkeypatch.setattr(bound, "NEAR", 0)
    monkeypatch.setattr(best, "WIDE", (1,))
    monkeypatch.setattr(best, "WIDEST", (1, 4000))
    monkeypatch.setattr(best, "MOST_STATES", 10**9)
    walk = drawn_walk(2000 + seed, most=7)
    priced = [price(walk, choices) for choices in all_choices(walk)]
    peaks = sorted({each.peak for each in priced})
    for budget in (peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) * 2 // 3]):
        found = choose(walk, budget)
        assert found is not None
        assert found.seconds == min(each.seconds for each in priced if each.peak <= budget)
        assert found.proven


def test_nothing_to_choose() -> None:
    walk = drawn_walk(0)
    empty = type(walk)((), (5, 3), (5, 3))
    found = choose(empty, 5)
    assert found is not None
    assert (found.choices, found.seconds, found.peak) == ((), 0.0, 5)
    assert choose(empty, 4) is None
    assert not math.isinf(found.least)
