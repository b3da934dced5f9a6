"""The choice where tensors may leave for a store: the cheapest of all that fit, and a step takes no more."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.planned_peaks import in_channels_last, module_by, step, weights_of
from tests.memory.stores import ROOM
from tests.planning.memory.drawn_walks import all_choices, drawn_walk
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.memory_policy import keep_all
from tiledseg.memory.disk.file_mover import FileMover
from tiledseg.memory.disk.file_store import FileStore
from tiledseg.memory.offload import Offload
from tiledseg.planning.memory import choice, leaving
from tiledseg.planning.memory.choice import step_choices
from tiledseg.planning.memory.leaving import choose, held
from tiledseg.planning.memory.store import Store
from tiledseg.planning.run.memory import offload_by
from tiledseg.planning.walk.items import Walk, price
from tiledseg.planning.walk.network_walk import Speed
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.offloading import hooks_of

GRAPHS = 210
QUICK = Store(1e15, 1e15, Speed(1e9, 1e9))


def walk_to_leave(seed: int) -> Walk:
    """Most of its items may leave, quickly, of few sizes; little is there whatever is chosen."""
    draw, walk = random.Random(seed), drawn_walk(5000 + seed, most=6)
    items = tuple(
        replace(
            item,
            bytes=draw.choice((2, 4, 4, 8)),
            offload=draw.randint(0, 4) / 4 if draw.random() < 0.7 else math.inf,
            fetched=0,
        )
        for item in walk.items
    )
    base, before = (tuple(size // 4 for size in sizes) for sizes in (walk.base, walk.rebuilding))
    return Walk(items, base, before)


def test_the_choice_is_the_cheapest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tensors three as large as the largest would be all: here one of them stays."""
    monkeypatch.setattr(leaving, "STAYING", 1)
    drawn = (walk_to_leave(seed) for seed in itertools.count())
    left = 0
    for walk in itertools.islice((walk for walk in drawn if len(walk.items) > 3), GRAPHS):
        priced = [(price(walk, each), held(walk, each)) for each in all_choices(walk)]
        peaks = sorted({cost.peak + more for cost, more in priced})
        for budget in (peaks[0] - 1, peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2]):
            fitting = [cost.seconds for cost, more in priced if cost.peak + more <= budget]
            best = choose(walk, budget)
            if not fitting:
                assert best is None, "nothing fits"
                continue
            assert best is not None, "something fits"
            cost = price(walk, best.choices)
            assert best.peak == cost.peak + held(walk, best.choices) <= budget
            assert best.seconds == cost.seconds == min(fitting)
            assert best.proven, "all of it was looked at"
            left += "offload" in best.choices
    assert left > GRAPHS / 2, "it often pays to have something leave"


@pytest.mark.parametrize("norm", ["none", "instance"])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_a_step_takes_at_most_what_is_planned(
    norm: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same gradients, to the last bit."""
    monkeypatch.setattr(leaving, "LEAST", 1)
    unet, side = UNet(4, base_channels=8, norm=norm), 256
    choices = step_choices(unet.graph(), unet.bands, (side, side), 4, QUICK)
    low = choices.fixed + max(choices.walk.base)
    found = choices.choose(int(low + share * (choices.kept - low)))
    assert found is not None, "it fits"
    plan = offload_by(found)
    assert plan is not None, "something leaves"
    x_BCHW = torch.randn(1, unet.bands, side, side).contiguous(memory_format=torch.channels_last)
    kept = in_channels_last(module_by(unet, keep_all(unet.graph())))
    with AllocationMeter(weights_of(kept)):  # who is followed sums weights' gradients in another order
        for _ in range(3):
            step(kept, x_BCHW)
    with Offload(lambda: FileMover(FileStore(tmp_path, ROOM)), plan.staying, 1, all_kept=False) as moving:
        module = in_channels_last(module_by(unet, found.policy, hooks_of(moving)))
        peaks = []
        for _ in range(3):
            with AllocationMeter(weights_of(module)) as meter:
                step(module, x_BCHW.clone())
            peaks.append(meter.peak)
    assert moving.figures.bytes_out > 0
    assert moving.figures.peak_bytes <= plan.staying
    assert max(peaks) == pytest.approx(found.peak - choices.fixed, rel=0.002)
    assert all(torch.equal(*grads) for grads in zip(weights_of(kept), weights_of(module), strict=True))


def test_what_fits_without_a_store_is_found_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time has ended before any choice was found by which tensors may leave; how good it is, is not known."""
    asked = UNet(3, base_channels=8).graph(), 4, (256, 256), 4
    plain, stored = step_choices(*asked), step_choices(*asked, Store(1e6, 1e6, Speed()))
    budget = plain.fixed + max(plain.walk.base) + (plain.kept - plain.fixed - max(plain.walk.base)) // 2
    expected = plain.choose(budget)
    monkeypatch.setattr(choice, "choose", lambda walk, *given: None if leaves(walk) else choose(walk, *given))
    found = stored.choose(budget)
    assert expected is not None
    assert found is not None
    assert leaves(stored.walk)
    assert not found.away
    assert (found.policy, found.peak, found.extra) == (expected.policy, expected.peak, expected.extra)
    assert (expected.gap, found.gap) == (0, 1)


def leaves(walk: Walk) -> bool:
    return any(item.can_be("offload") for item in walk.items)
