"""What the ranks of an image are told to send each other, as integers."""

from __future__ import annotations

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import block_partition, settle
from tiledseg.models.network import build_modules
from tiledseg.spatial.block_network import BlockNetwork, BlockProgram, ImageRanks

UNET = UNet(3, 2, 3, 4, "same", "instance", "bilinear", bands=2, classes=3)
GRAPH = UNET.graph()
RANKS = (2, 3)
SIZE = (48, 96)


def programs(blocks: int) -> list[BlockProgram]:
    """Of each rank."""
    ranks = (settle(GRAPH, Partition.even(size, count)) for size, count in zip(SIZE, RANKS, strict=True))
    rows, cols = (block_partition(GRAPH, cut, blocks) for cut in ranks)
    places = [(row, col) for row in range(RANKS[0]) for col in range(RANKS[1])]
    network = BlockNetwork(build_modules(UNET))
    return [network.program(rows, cols, None, ImageRanks(*RANKS, at)) for at in places]


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_one_sends_the_other_receives(blocks: int) -> None:
    """In one order; and all take part for the same tensors."""
    found = programs(blocks)
    for tensor in {tensor for program in found for tensor in program.traffic}:
        for giver, one in enumerate(found):
            for taker, other in enumerate(found):
                assert one.traffic[tensor].sends.get(taker) == other.traffic[tensor].receives.get(giver)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_window_is_own_blocks_and_what_has_come(blocks: int) -> None:
    for program in programs(blocks):
        for segment in program.runs:
            for run in segment.values():
                for tensor, window in run.windows.items():
                    here = {strip for strips in _received(program, tensor) for strip in strips}
                    assert {strip for strip in window.others if strip.block not in program.own} <= here
                    inside = window.box.clip(Box.of_shape((program.rows[tensor].size, program.cols[tensor].size)))
                    own = [] if window.own is None else [window.own]
                    assert sum(box.area for box in (*own, *(strip.box for strip in window.others))) == inside.area


def _received(program: BlockProgram, tensor: int) -> list:
    return list(program.traffic[tensor].receives.values()) if tensor in program.traffic else []


def test_blocks_of_a_rank_are_a_rectangle_of_its_part() -> None:
    found = programs(2)
    whole = [program.own_box for program in found]
    assert sorted(block for program in found for block in program.own) == list(range(found[0].blocks))
    assert sum(box.area for box in whole) == SIZE[0] * SIZE[1]
    for program, box in zip(found, whole, strict=True):
        assert sum(program.box(0, block).area for block in program.own) == box.area
