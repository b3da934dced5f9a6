"""The greedy choice: it fits, and it is about as cheap as the best of all choices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, WORDS
from tiledseg.planning.walk.choice import StepChoices, step_choices
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.planning.walk.items import Item, Walk, price

WALKS, NETWORKS = 60, 25
STORES = {
    "none": None,
    "disk": Store(2e9, 1e9, Machine(60e9, memory_bandwidth=8e9)),
    "host": Store(50e9, 50e9, Machine(400e12, memory_bandwidth=3e12)),
}


def drawn_walk(seed: int, most: int = 8) -> Walk:
    """Of up to `most` items in a graph with skips, some of which cannot be rebuilt, or sent away."""
    draw = random.Random(seed)
    count, sends = draw.randint(1, most), draw.random() < 0.4
    moments = draw.randint(count, 2 * count + 2)
    items = []
    for index in range(count):
        after = min(moments - 1, draw.choice([index, index + draw.randint(0, moments - 1 - index)]))
        parents = sorted(set(draw.sample(range(index), min(index, draw.choice([0, 1, 1, 1, 2])))))
        if index and draw.random() < 0.6:
            parents = sorted({index - 1, *parents[:1]})
        rebuild = math.inf if draw.random() < 0.15 else draw.randint(1, 9) / 2
        offload = math.inf if not sends or draw.random() < 0.5 else draw.randint(0, 8) / 4
        work = draw.choice([0, 0, draw.randint(0, 12)])
        size = draw.randint(0, 12)
        used = draw.random() < 0.8
        cheap = draw.random() < 0.4
        items.append(Item(f"i{index}", size, after, rebuild, tuple(parents), work, offload, used, cheap))
    for index, item in reversed(list(enumerate(items))):
        if not item.used:
            children = [child.after for child in items if index in child.parents]
            after = min(children, default=item.after)
            items[index] = replace(item, after=max(0, after - draw.choice([0, 0, 0, 1])))
    base = [draw.randint(0, 15) for _ in range(moments)]
    return Walk(tuple(items), tuple(base), tuple(draw.randint(0, here) for here in base), forward=1 / 3)


def all_choices(walk: Walk) -> Iterator[tuple[str, ...]]:
    """Every choice of which each part can be."""
    return itertools.product(*([each for each in WORDS if item.can_be(each)] for item in walk.items))


ITEMS = (
    Item("a", 4, 0, 1.0, offload=3.0),
    Item("b", 2, 1, 2.0, (0,), work=1),
    Item("c", 3, 2, 0.5, (1,), cheap=True),
    Item("d", 5, 3, 4.0, (2,)),
)
WORD = {"k": KEEP, "r": REBUILD, "o": OFFLOAD}


@pytest.mark.parametrize(
    ("letters", "seconds", "needs"),
    [
        ("kkkk", 0.0, (0, 4, 6, 9, 14)),
        ("okkk", 3.0, (0, 0, 2, 5, 10)),
        ("krkk", 2.0, (0, 5, 4, 7, 12)),  # b once, at its use, with its work
        ("rrkk", 3.0, (0, 5, 0, 3, 8)),  # a is there from b's use on
        ("krrk", 2.5, (0, 4, 7, 4, 9)),  # b is made for c, and stays
        ("kkrr", 5.0, (0, 4, 6, 9, 6)),  # the cheap c is made twice, for d and for its own use
    ],
)
def test_a_choice_has_the_price_summed_by_hand(letters: str, seconds: float, needs: tuple[int, ...]) -> None:
    """Peaks of whole networks are checked against torch: tests/planning/test_step_memory.py."""
    assert price(Walk(ITEMS, (0,) * 5, (0,) * 5), [WORD[letter] for letter in letters]) == (seconds, needs)


@pytest.mark.parametrize(
    ("letters", "seconds", "needs"),
    [
        ("kkk", 0.0, (1, 8, 8, 9)),  # b is never at its use: it waits from there on
        ("krr", 3.0, (1, 6, 8, 4)),  # b is made with c, at c's use: 2 of `rebuilding`, a and b
    ],
)
def test_a_choice_with_a_base_and_an_unused_item(letters: str, seconds: float, needs: tuple[int, ...]) -> None:
    items = Item("a", 4, 0, 1.0), Item("b", 2, 1, 2.0, (0,), used=False), Item("c", 3, 2, 1.0, (1,))
    walk = Walk(items, (1, 2, 2, 0), (0, 1, 2, 2))
    assert price(walk, [WORD[letter] for letter in letters]) == (seconds, needs)


def test_drawn_walks_fit_and_nearly_all_are_as_cheap_as_the_best() -> None:
    """For five budgets each, from one that nothing fits to one that everything fits, with stores and skips."""
    exact = missed = total = 0
    for step in (StepChoices(drawn_walk(1000 + seed)) for seed in range(WALKS)):
        priced = [(price(step.walk, words).seconds, step.bytes_by(words)) for words in all_choices(step.walk)]
        peaks = sorted({peak for _, peak in priced})
        for budget in (peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) * 2 // 3], peaks[-1]):
            best, chosen = (
                min([seconds for seconds, peak in priced if peak <= budget], default=None),
                step.choose(budget),
            )
            assert chosen is None or best is not None, "nothing fits"
            if chosen is None or best is None:
                missed += best is not None
                continue
            total += 1
            assert chosen.peak <= budget
            assert chosen.extra >= best
            exact += chosen.extra == best
    assert missed <= 1
    assert exact >= 0.99 * total


def test_drawn_networks_take_at_most_a_hundredth_of_a_step_more_than_the_best() -> None:
    """Brute force over all choices, at budgets from the least that anything fits upward."""
    more = []
    for step in drawn_networks():
        priced = [(price(step.walk, words).seconds, step.bytes_by(words)) for words in all_choices(step.walk)]
        low, high = min(peak for _, peak in priced), step.kept
        for share in (0.0, 0.1, 0.25, 0.5, 0.75):
            budget = int(low + share * (high - low))
            chosen = step.choose(budget)
            assert chosen is not None
            assert chosen.peak <= budget
            best = min(seconds for seconds, peak in priced if peak <= budget)
            more.append(chosen.extra - best / (3 * step.walk.forward))
    more.sort()
    assert more[len(more) * 95 // 100] < 1e-9, "equal"
    assert more[-2] < 0.01
    assert more[-1] < 0.02


def drawn_networks() -> Iterator[StepChoices]:
    for seed in range(NETWORKS):
        draw = random.Random(seed)
        unet = UNet(
            draw.choice((1, 2)),
            base_channels=draw.choice((4, 8, 16, 64)),
            convs_per_level=draw.choice((1, 1, 2)),
            norm=draw.choice(("none", "none", "pixel", "instance")),
            upsampling=draw.choice(("transposed", "nearest", "bilinear")),
        )
        size = draw.choice((256, 512))
        speed = Machine(draw.choice((1e10, 1e12, 1e13)), memory_bandwidth=6e11)
        step = step_choices(unet.graph(), unet.bands, (size, size), 4, machine=speed)
        if sum(item.can_be(REBUILD) for item in step.walk.items) <= 11:
            yield step


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_what_fits_a_budget_fits_a_larger_one(norm: str, store: str) -> None:
    """From the least on there is a choice; it takes no more time where the budget is much larger."""
    unet = UNet(2, norm=norm)
    step = step_choices(unet.graph(), unet.bands, (1024, 1024), 4, STORES[store])
    extras = []
    for share in (0, 40, 100):
        budget = step.least + share * (step.kept - step.least) // 100
        chosen = step.choose(budget)
        assert chosen is not None
        assert chosen.peak == step.peak(chosen.policy) <= budget
        extras.append(chosen.extra)
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0


def test_several_passes_in_memory_share_the_budget() -> None:
    """As on a stage: three micro-batches are kept, one of them goes backward."""
    unet = UNet(3, base_channels=8, norm="instance")
    step = step_choices(unet.graph(), unet.bands, (256, 256), 4)
    three = StepChoices(step.walk, step.fixed, complete=3)
    assert three.kept > 2.5 * step.kept - 2 * step.fixed
    budget = (three.kept + three.least) // 2
    chosen = three.choose(budget)
    assert chosen is not None
    words = step.walk.needed_words(chosen.policy)
    assert chosen.peak == step.peak(chosen.policy) + 2 * step.walk.kept(words) <= budget


def test_nothing_to_choose() -> None:
    empty = StepChoices(Walk((), (5, 3), (5, 3), forward=1.0))
    chosen = empty.choose(5)
    assert chosen is not None
    assert (chosen.items, chosen.extra, chosen.peak) == ((), 0.0, 5)
    assert empty.choose(4) is None
