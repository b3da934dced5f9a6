"""The units of a pass in any halo mode: parts, micro-batches, pieces of a map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.tiling import Tile
from tiledseg.models.layers.block import cropped
from tiledseg.raster.samples.draws import Draw


class Part(NamedTuple):
    """The unit that a rank loads: a tile of an image, or its block of the image, as it lies on the disk or as a draw
    changes it."""

    image: int
    tile: Tile
    draw: Draw | None = None


class MicroBatch(NamedTuple):
    """The unit that the network runs on, the micro-batch of a pipeline: a tile of a part, or all of it."""

    image: int
    tile: Tile
    part: Tile

    def piece(self, *outputs_BKHW: torch.Tensor) -> Piece:
        """Return what the micro-batch owns of the network's outputs on it."""
        rows, cols = self.tile.core_in_output.slices
        first, *others = (cropped(output_BKHW, rows, cols) for output_BKHW in outputs_BKHW)
        return Piece(first, self.tile.core, self.tile.core.relative_to(self.part.core), tuple(others))


class Shared(NamedTuple):
    """The input of a micro-batch as ranks own it along `rows` and `cols`, this one at `at` (row, col). `output`: where
    the whole output begins in the raster. `where`: the tile's place in the image, where it is only a part of it."""

    rows: Partition
    cols: Partition
    at: tuple[int, int]
    output: Box
    where: tuple[Box, Box] | None


@dataclass(frozen=True)
class Piece:
    """The network's output on pixels that this rank owns: `core` in raster positions, `in_part` in the part's core.
    `others`: further outputs on them, of a network that has some, where it is trained."""

    logits_BKHW: torch.Tensor
    core: Box
    in_part: Box
    others: tuple[torch.Tensor, ...] = ()
