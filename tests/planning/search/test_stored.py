"""A search where a disk may take what memory cannot: blocks, and tensors that leave until they are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.search.test_best import question
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.planning.answer.search import with_stores
from tiledseg.planning.cost_model.machine import CopyRates
from tiledseg.planning.memory.choice import step_choices
from tiledseg.planning.memory.store import STAYING, Store
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.search.best import explained, search
from tiledseg.planning.search.space import Candidate
from tiledseg.planning.walk.items import Speed, price
from tiledseg.user_files.machine import find_machine

CPU = find_machine("cpu")
SPEED = Speed(100e9, 20e9)
QUICK, SLOW = Store(20e9, 20e9, SPEED), Store(1e6, 1e6, SPEED)


def norms(ranks: int = 1, memory: int = 128 << 20, **given: Any) -> RunQuestion:
    """An image that has to stay whole, and does not fit."""
    asked = question(ranks, memory=memory, norm="instance", rasters=(Extent((1024, 1024)),), machine=CPU)
    return replace(asked, **given)


def tight(store: Store) -> RunQuestion:
    """A third of the way from what a step needs at least to all that it keeps."""
    network = UNet(5)
    step = step_choices(network.graph(), network.bands, (1024, 1024), 4)
    low = step.fixed + max(step.walk.base)
    memory = low + (step.kept - low) // 3
    return RunQuestion(network, (Extent((1024, 1024)),), 1, memory, machine=CPU, grid=(1, 1), store=store)


def test_blocks_are_taken_where_nothing_else_fits() -> None:
    with pytest.raises(ConfigError, match="none of"):
        search(norms(), 1)
    found = search(norms(blocks=BlocksAsked(None, True, True, QUICK)), 1).winner
    assert found.in_words == "read, in blocks, grid 1 x 1"
    assert found.plan.blocks is not None
    assert found.memory == found.plan.memory <= 128 << 20
    assert found.time.again == pytest.approx(found.plan.blocks.extra * (found.time.forward + found.time.backward))
    by_hand = BlocksAsked(found.plan.blocks.shape, True, store=QUICK)
    assert plan_run(norms(grid=(1, 1), blocks=by_hand)).blocks == found.plan.blocks


def test_several_images_with_a_batch_norm_may_go_in_blocks() -> None:
    """By tiles that are whole each would take statistics of its own."""
    network = replace(norms().network, norm="batch")
    asked = norms(network=network, images_per_step=3, blocks=BlocksAsked(None, True, True, QUICK))
    winner = search(asked, 1).winner
    assert winner.in_words == "read, in blocks, grid 1 x 1"
    assert winner.plan.spread.together


def test_ranks_that_share_layers_may_have_blocks_each() -> None:
    asked = norms(4, 48 << 20, blocks=BlocksAsked(None, True, True, QUICK))
    winner = search(asked, 1).winner
    assert winner.candidate.kind == "layer, in blocks"
    assert winner.ranks == 4


def test_a_quicker_way_is_taken_in_place_of_blocks() -> None:
    """Where all fits nothing of them is in the answer, and where a finer grid is quicker they are another kind."""
    asked = question(4, blocks=BlocksAsked(None, True, True, QUICK))
    found = search(asked, 1)
    assert [each.in_words for each in found.best] == [each.in_words for each in search(question(4), 1).best]


def test_tensors_leave_where_the_disk_is_quicker_than_computing_once_more() -> None:
    quick, slow = (search(tight(store), 1).winner for store in (QUICK, SLOW))
    assert quick.plan.offloaded is not None
    assert slow.plan.offloaded is None
    assert quick.seconds < slow.seconds
    more = 1000 * (slow.time.again - quick.time.again)
    assert f"-{more:.4g} ms of computing once more, and the store" in explained(quick, slow)


def test_a_gpus_tensors_leave_for_its_hosts_memory() -> None:
    """Where the profile knows the way there, and the user has not said what is computed once more; what stays of them
    counts."""
    profile = replace(find_machine("h100"), host_store=CopyRates(1e15, 1e15))
    asked = with_stores(replace(tight(QUICK), machine=profile, store=None))
    assert asked.store == Store(1e15, 1e15, Speed(profile.flops, profile.memory_bandwidth)), "each its own way"
    assert asked.blocks is None, "nobody knows a disk"
    assert with_stores(replace(asked, store=None, recompute="all")).store is None
    assert with_stores(replace(asked, machine=replace(profile, host_store=None))).store is None
    plan = search(asked, 1).winner.plan
    assert plan.rebuilt is not None
    assert plan.offloaded is not None
    step = step_choices(asked.graph, asked.network.bands, (1024, 1024), 4, asked.store)
    policy, sizes = plan.rebuilt.policy, [size for _, size in plan.rebuilt.away]
    beside = step.fixed + price(step.walk, step.walk.needed_words(policy)).peak
    assert plan.memory == plan.rebuilt.peak == beside + STAYING * max(sizes) <= asked.memory


def test_stages_have_no_store() -> None:
    asked = Candidate("read", (2, 2), None, 1, 2).question(tight(QUICK))
    assert asked.store is None
    assert asked.blocks is None
