"""The choice is the cheapest of all that fit: equal to trying them all."""

from __future__ import annotations

import math

import pytest

from tests.planning.memory.drawn_walks import all_choices, drawn_walk, replayed
from tiledseg.architecture.unet import UNet
from tiledseg.planning.memory import best, bound
from tiledseg.planning.memory.choice import step_choices
from tiledseg.planning.memory.ways import Ways
from tiledseg.planning.walk import parts
from tiledseg.planning.walk.items import Walk, price, price_all_kept
from tiledseg.planning.walk.parts import Part


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
    """Each link is split, however near, after a look at few states: what no part's bound may hide is found."""
    monkeypatch.setattr(parts, "NEAR", 0)
    monkeypatch.setattr(bound, "NEAR", 0)
    monkeypatch.setattr(best, "NARROW", 1)
    monkeypatch.setattr(best, "WIDER", 2)
    monkeypatch.setattr(best, "ROOT", 0)
    walk = drawn_walk(2000 + seed, most=7)
    priced = [price(walk, choices) for choices in all_choices(walk)]
    peaks = sorted({each.peak for each in priced})
    for budget in (peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) * 2 // 3]):
        found = choose(walk, budget)
        assert found is not None
        assert found.seconds == min(each.seconds for each in priced if each.peak <= budget)
        assert found.proven


def test_work_has_an_end() -> None:
    """What was found until then is said, with what is not proven."""
    unet = UNet(8, norm="instance")
    walk = step_choices(unet.graph(), unet.bands, (1024, 1024), 4).walk
    low, kept = max(walk.base), price_all_kept(walk).peak
    ways, whole, budget = Ways(walk), Part.whole(walk), low + (kept - low) * 65 // 100
    found = best.find(ways, budget, whole, most_work=100_000)
    assert found.choices is not None
    assert found.priced(walk, 0).gap > 0
    assert best.find(ways, budget, whole, below=found.least).choices is None


def test_nothing_to_choose() -> None:
    walk = drawn_walk(0)
    empty = type(walk)((), (5, 3), (5, 3))
    found = choose(empty, 5)
    assert found is not None
    assert (found.choices, found.seconds, found.peak) == ((), 0.0, 5)
    assert choose(empty, 4) is None
    assert not math.isinf(found.least)


def choose(walk: Walk, budget: int) -> best.Chosen | None:
    """Where nothing stays of what leaves."""
    found = best.find(Ways(walk, budget), budget, Part.whole(walk))
    return None if found.choices is None else found.priced(walk, 0)
