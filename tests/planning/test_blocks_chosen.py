"""Blocks that a budget demands: taken where nothing else fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError, InputError
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.memory.store import Store
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism

MIB = 1 << 20
CPU = Store(2e9, 1e9, Machine(6e10, memory_bandwidth=1e10))
NORMED = UNet(3, base_channels=8, norm="instance")


def question(network: UNet = NORMED, memory: int = 150 * MIB, side: int = 1024, **given: Any) -> RunQuestion:
    asked = {"blocks": BlocksAsked(None, True, True, CPU), "budgeted": True} | given
    return RunQuestion(network, (Extent((side, side)),), asked.pop("ranks", 1), memory, **asked)


def test_blocks_are_taken_where_nothing_else_fits() -> None:
    asked = question()
    with pytest.raises(BudgetError):
        plan_run(replace(asked, blocks=None))
    plan = plan_run(asked)
    assert plan.blocks is not None, "nothing else fits"
    assert plan.rebuilt is None
    assert plan.blocks.memory == plan.memory <= asked.memory
    assert plan.blocks.extra > 0, "each layer is computed twice"
    assert "GiB a step, for about" in plan.blocks.in_words
    assert not plan.warnings


def test_a_step_that_fits_is_left_whole() -> None:
    """And so is one that does when some tensors are computed once more: that takes less time."""
    kept = plan_run(question(memory=1 << 40))
    assert kept.blocks is kept.rebuilt is None
    plan = plan_run(question(memory=int(0.8 * kept.memory)))
    assert plan.blocks is None
    assert plan.rebuilt is not None, "some tensors are computed once more"


def test_blocks_in_memory_that_is_too_small_are_not_taken() -> None:
    """What is stored would not fit; the error says what there is to be done."""
    with pytest.raises(BudgetError, match=r"memory\.budget is"):
        plan_run(question(blocks=BlocksAsked(None, if_needed=True), memory=200 * MIB))


def test_without_a_budget_that_was_asked_for_too() -> None:
    plan = plan_run(question(budgeted=False))
    assert plan.blocks is not None, "the whole does not fit what is free"
    assert not plan.warnings


def test_a_finer_grid_is_taken_where_it_fits() -> None:
    """A grid that the user set is kept."""
    network = UNet(2, base_channels=8, norm="none")
    shallow = plan_run(question(network, 100 * MIB))
    assert shallow.blocks is None
    assert len(shallow.tilings[0]) > 1
    given = plan_run(question(network, 100 * MIB, grid=(1, 1)))
    assert given.blocks is not None, "the grid is what was asked for"


@pytest.mark.parametrize(
    "parallel",
    [Parallelism(halo="exchange"), Parallelism(stages=2, recompute=("never",) * 2)],
    ids=["exchange", "stages"],
)
def test_where_blocks_cannot_be_all_is_as_without(parallel: Parallelism) -> None:
    asked = question(UNet(3, base_channels=8, norm="pixel"), 20 * MIB, grid=(2, 2), ranks=2, parallel=parallel)
    found = []
    for each in (asked, replace(asked, blocks=None)):
        with pytest.raises(InputError) as told:
            plan_run(each)
        found.append(str(told.value))
    assert found[0] == found[1]


def test_ranks_that_share_an_image_take_blocks_too() -> None:
    plan = plan_run(question(memory=120 * MIB, ranks=2, parallel=Parallelism(halo="layer")))
    assert plan.blocks is not None, "nothing else fits"
    assert plan.spread.fusion == 1
    assert plan.memory <= 120 * MIB
