"""Plans of drawn steps, against counting tick by tick and against trying all sets."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from tiledseg.memory.disk.slots import PAGE, whole_pages
from tiledseg.memory.plan import bytes_held, choose_leaving, peak, place_returns, plan_step
from tiledseg.memory.timeline import Life


def drawn_step(seed: int) -> list[Life]:
    """Storages saved one after another and used mostly in the opposite order; some held by others, some never used."""
    draw = random.Random(seed)
    count = draw.randrange(1, 9)
    uses = list(range(count + 1, 2 * count + 1))
    lives = []
    for k in range(count):
        at = [uses[count - 1 - k]] if draw.random() < 0.9 else []
        if at and draw.random() < 0.3:
            at.append(draw.randrange(at[0], 2 * count + 2))
        alone = None if draw.random() < 0.1 else k + 1 + draw.randrange(2)
        freed = at[-1] + 1 if at and draw.random() < 0.9 else None
        lives.append(Life(draw.randrange(1, 9) * PAGE - draw.randrange(2), alone, at, freed))
    return lives


def held_at(lives: list[Life], leaving: frozenset[int], tick: int) -> int:
    return sum(
        life.size
        for k, life in enumerate(lives)
        if k not in leaving
        and life.alone is not None
        and life.alone <= tick
        and (life.freed is None or tick < life.freed)
    )


@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_those_counted_tick_by_tick(seed: int) -> None:
    lives = drawn_step(seed)
    leaving = frozenset(range(0, len(lives), 3))
    held = bytes_held(lives, leaving)
    assert held == [held_at(lives, leaving, tick) for tick in range(len(held))]


@pytest.mark.parametrize("seed", range(60))
def test_what_stays_is_within_the_limit_and_no_smaller_set_leaves_for_nothing(seed: int) -> None:
    lives = drawn_step(seed)
    for limit in (0, 5 * PAGE, 12 * PAGE, 100 * PAGE):
        leaving = choose_leaving(lives, limit)
        assert peak(lives, leaving) <= limit
        if leaving:
            assert peak(lives, frozenset()) > limit
            best = _fewest_bytes(lives, limit)
            assert sum(lives[k].size for k in leaving) <= best + max(life.size for life in lives) + limit


def _fewest_bytes(lives: list[Life], limit: int) -> int:
    sets = [frozenset(some) for count in range(len(lives) + 1) for some in combinations(range(len(lives)), count)]
    return min(sum(lives[k].size for k in some) for some in sets if peak(lives, some) <= limit)


def test_the_longest_unused_leaves_first() -> None:
    lives = [Life(PAGE, 1 + k, [20 - k], 21 - k) for k in range(5)]
    assert choose_leaving(lives, 3 * PAGE) == {0, 1}


@pytest.mark.parametrize("seed", range(60))
def test_places_in_the_window_never_overlap_while_both_are_needed(seed: int) -> None:
    """By a clock of its own: a read begins when its place is free, in the order of the first uses."""
    lives = drawn_step(seed)
    leaving = frozenset(k for k, life in enumerate(lives) if life.alone is not None)
    window = 9 * PAGE
    returns = place_returns(lives, leaving, window)
    first = [min(t for t in lives[r.storage].uses if t > (lives[r.storage].alone or 0)) for r in returns]
    assert first == sorted(first)
    taken: list[tuple[int, int, int]] = []
    for r, needed in zip(returns, first, strict=True):
        if r.offset is None:
            continue
        stop = r.offset + whole_pages(lives[r.storage].size)
        assert stop <= window
        for begin, end, last in taken:
            assert stop <= begin or end <= r.offset or last < needed, "the place is free before it is wanted"
        taken.append((r.offset, stop, lives[r.storage].uses[-1]))


@pytest.mark.parametrize("seed", range(60))
def test_all_that_stays_and_the_window_are_within_the_budget(seed: int) -> None:
    lives = drawn_step(seed)
    for budget in (0, 7 * PAGE, 20 * PAGE):
        plan = plan_step(lives, budget)
        assert peak(lives, plan.leaving) + plan.window <= budget
        if plan.window == 0 and any(whole_pages(lives[r.storage].size) <= budget // 4 for r in plan.returns):
            assert used_at_once(lives, plan.leaving) <= budget, "else there is a window for them"
        wanted = {k for k in plan.leaving if any(t > (lives[k].alone or 0) for t in lives[k].uses)}
        assert {r.storage for r in plan.returns} == wanted


def used_at_once(lives: list[Life], leaving: frozenset[int]) -> int:
    """The most bytes of what stays and of what has come back and is still needed, at a tick of its need."""
    most = 0
    for tick in range(1 + max((t for life in lives for t in life.uses), default=0)):
        back = [
            lives[k].size
            for k in leaving
            if (later := [t for t in lives[k].uses if t > (lives[k].alone or 0)]) and later[0] <= tick <= later[-1]
        ]
        most = max(most, held_at(lives, leaving, tick) + sum(back) if back else 0)
    return most


def test_what_comes_back_late_needs_no_window() -> None:
    """All that stays has been used by then."""
    lives = [Life(PAGE, 1 + k, [20 - k], 21 - k) for k in range(6)]
    plan = plan_step(lives, 3 * PAGE)
    assert plan.window == 0
    assert plan.leaving == {0, 1, 2}
    assert [r.storage for r in plan.returns] == [2, 1, 0]
    assert used_at_once(lives, plan.leaving) == PAGE


def test_a_step_that_fits_moves_nothing() -> None:
    lives = [Life(PAGE, 1, [3], 4), Life(PAGE, 2, [3], 4)]
    assert plan_step(lives, 2 * PAGE).leaving == frozenset()
    assert plan_step([], 0).leaving == frozenset()
