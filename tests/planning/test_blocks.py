"""Blocks of a tile: what they are planned to take, against what torch allocates, and how many auto means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.law.every_layer import ForeignLayers
from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import Communicator
from tiledseg.errors import BudgetError, ConfigError, InputError
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.memory import file_store
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.models.network import build_modules
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk import segment_memory as segment_memory_module
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.planning.walk.segment_memory import BlockedStep
from tiledseg.spatial.block_network import BlockNetwork
from tiledseg.spatial.block_pass import BlockPass, Together
from tiledseg.spatial.image_pass import Image

NETWORK = UNet(3, 2, 3, 8, norm="instance", bands=4, classes=3)
SIDE = 256


@pytest.mark.parametrize(
    ("blocks", "images"), [((2, 2), None), ((4, 4), None), ((8, 1), None), ((4, 4), 1), ((4, 4), 3), ((1, 1), 2)]
)
def test_the_memory_is_what_is_allocated(blocks: tuple[int, int], images: int | None) -> None:
    """Also of so many images that go together, for the sake of a batch norm."""
    described = NETWORK if images is None else replace(NETWORK, norm="batch")
    network = build_modules(described, seed=0).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in network.parameters() for tensor in (p, p.grad) if tensor is not None]
    labels_BHW = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    twin = BlockNetwork(network)
    cuts = twin.partitions((Partition((0, SIDE)), Partition((0, SIDE))), blocks)
    program = twin.program(*cuts, together=images is not None)
    together = None if images is None else Together(Communicator(), torch.device("cpu"))
    with AllocationMeter([*known, *network.buffers()]) as meter:
        inputs = [torch.randn(1, SIDE, SIDE, 4).permute(0, 3, 1, 2) for _ in range(images or 1)]
        run = BlockPass(twin, [Image(x_BCHW, program) for x_BCHW in inputs], MemoryShelf(), together=together)
        del inputs
        run.forward()

        def loss(block: int, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            rows, cols = program.box(len(twin.graph), block).slices
            return functional.cross_entropy(outputs[0], labels_BHW[:, rows, cols], reduction="sum")

        run.backward(*[loss] * len(run.images))
    planned = BlockedStep(described.graph(), 4, (SIDE, SIDE), blocks, together=images)
    steps = planned.total(False) - planned.fixed
    assert 0.97 * meter.peak <= steps <= 1.15 * meter.peak


def test_what_is_on_its_way_to_a_file_counts_as_the_shelf_bounds_it() -> None:
    assert segment_memory_module.MOST_WRITTEN == file_store.MOST_WRITTEN


def test_of_a_map_less_lies_there() -> None:
    """No gradients, no optimizer; and each tensor goes when the last segment that takes it has."""
    sizes = NETWORK.graph(), 4, (SIDE, SIDE), (4, 4)
    trained, mapped = (BlockedStep(*sizes, trains=trains) for trains in (True, False))
    assert mapped.stored < 0.75 * trained.stored
    assert mapped.total(False) < 0.75 * trained.total(False)


def test_ranks_that_share_an_image_need_a_part_each() -> None:
    shared = Partition((0, SIDE // 2, SIDE)), Partition((0, SIDE))
    alone = BlockedStep(NETWORK.graph(), 4, (SIDE, SIDE), (4, 4))
    each = BlockedStep(NETWORK.graph(), 4, (SIDE, SIDE), (2, 4), shared=shared)
    assert each.stored == pytest.approx(alone.stored / 2, rel=0.01)
    working = [one.total(False) - one.fixed - one.image - one.stored for one in (each, alone)]
    assert working[0] <= working[1]


def question(memory: int, shape: tuple[int, int] | None = None, in_file: bool = False) -> RunQuestion:
    return RunQuestion(NETWORK, (Extent((1024, 1024)),), 1, memory, blocks=BlockSettings(shape, in_file))


def test_auto_takes_the_fewest_that_fit() -> None:
    """A norm over the image is exact, on one tile."""
    plans = {memory: plan_run(question(memory << 20, in_file=True)) for memory in (2048, 300, 150)}
    found = [plan.blocks for plan in plans.values()]
    assert all(plan.tilings[0].grid == (1, 1) for plan in plans.values())
    assert [blocks.shape[0] for blocks in found if blocks] == sorted(blocks.shape[0] for blocks in found if blocks)
    for memory, plan in plans.items():
        assert plan.blocks is not None
        assert plan.memory == plan.blocks.memory <= memory << 20
        fewer = plan.blocks.shape[0] - 1
        if fewer:
            assert plan_run(question(memory << 20, (fewer, fewer), True)).memory > memory << 20


def test_too_little_memory_is_said() -> None:
    (note,) = plan_run(question(100 << 20, (2, 2))).warnings
    assert note.startswith("a training step in blocks needs up to ")
    assert "memory.store" in note


def test_blocks_that_were_asked_for_keep_to_the_budget() -> None:
    asked = replace(question(100 << 20, (2, 2)), budgeted=True)
    needed = plan_run(replace(asked, memory=1 << 40)).memory
    assert plan_run(replace(asked, memory=needed)).memory == needed
    with pytest.raises(BudgetError, match=rf"memory.budget is {needed - 1} bytes.* 2 x 2 blocks a tile needs {needed}"):
        plan_run(replace(asked, memory=needed - 1))


MIB = 1 << 20
CPU = Store(2e9, 1e9, Machine(6e10, memory_bandwidth=1e10))
NORMED = UNet(3, base_channels=8, norm="instance")


def budgeted(network: UNet = NORMED, memory: int = 150 * MIB, side: int = 1024, **given: Any) -> RunQuestion:
    asked = {"blocks": BlockSettings(None, True, True, CPU), "budgeted": True} | given
    return RunQuestion(network, (Extent((side, side)),), asked.pop("ranks", 1), memory, **asked)


@pytest.mark.parametrize("is_limit", [True, False])
def test_blocks_are_taken_where_nothing_else_fits(is_limit: bool) -> None:
    """Of the user's budget, or of the free memory."""
    asked = budgeted(budgeted=is_limit)
    if is_limit:
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
    kept = plan_run(budgeted(memory=1 << 40))
    assert kept.blocks is kept.rebuilt is None
    plan = plan_run(budgeted(memory=int(0.8 * kept.memory)))
    assert plan.blocks is None
    assert plan.rebuilt is not None, "some tensors are computed once more"


def test_blocks_in_memory_that_is_too_small_are_not_taken() -> None:
    """What is stored would not fit; the error says what there is to be done."""
    with pytest.raises(BudgetError, match=r"memory\.budget is"):
        plan_run(budgeted(blocks=BlockSettings(None, if_needed=True), memory=200 * MIB))


def test_a_finer_grid_is_taken_where_it_fits() -> None:
    """A grid that the user set is kept."""
    network = UNet(2, base_channels=8, norm="none")
    shallow = plan_run(budgeted(network, 100 * MIB))
    assert shallow.blocks is None
    assert len(shallow.tilings[0]) > 1
    given = plan_run(budgeted(network, 100 * MIB, grid=(1, 1)))
    assert given.blocks is not None, "the grid is what was asked for"


@pytest.mark.parametrize(
    "parallel",
    [Parallelism(halo="exchange"), Parallelism(stages=2, recompute=("never",) * 2)],
    ids=["exchange", "stages"],
)
def test_where_blocks_cannot_be_all_is_as_without(parallel: Parallelism) -> None:
    asked = budgeted(UNet(3, base_channels=8, norm="pixel"), 20 * MIB, grid=(2, 2), ranks=2, parallel=parallel)
    found = []
    for each in (asked, replace(asked, blocks=None)):
        with pytest.raises(InputError) as told:
            plan_run(each)
        found.append(str(told.value))
    assert found[0] == found[1]


def test_ranks_that_share_an_image_take_blocks_too() -> None:
    plan = plan_run(budgeted(memory=120 * MIB, ranks=2, parallel=Parallelism(halo="layer")))
    assert plan.blocks is not None, "nothing else fits"
    assert plan.spread.fusion == 1
    assert plan.memory <= 120 * MIB


def test_products_over_the_image_take_no_blocks() -> None:
    """A block has no sum of all pixels' products before the others."""
    asked = RunQuestion(ForeignLayers(True), (Extent((64, 64)),), 1, 1 << 30, grid=(1, 1), blocks=BlockSettings((2, 2)))
    with pytest.raises(ConfigError, match="'products' takes products over the whole image, all of it at once; leave"):
        plan_run(asked)
    assert plan_run(replace(asked, network=ForeignLayers(True, products=False))).blocks
