"""What goes through a network at once, in any halo mode: parts, micro-batches, pieces of a map; what a mode is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.tiling import Tile
from tiledseg.models.cropping import cropped
from tiledseg.models.network import GraphNetwork, Tensors
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.draws import Draw
from tiledseg.raster.samples.sampling import DrawnTile, TileReference
from tiledseg.records import dataclass


class Part(NamedTuple):
    """What a rank loads at once: a tile of an image, or its block of the image, as it lies on the disk or as a draw
    changes it."""

    image: int
    tile: Tile
    draw: Draw | None = None


class MicroBatch(NamedTuple):
    """What the network runs on at once, the micro-batch of a pipeline: a tile of a part, or all of it."""

    image: int
    tile: Tile
    part: Tile

    def piece(self, *outputs_BKHW: torch.Tensor) -> Piece:
        """What the micro-batch owns of the network's outputs on it."""
        rows, cols = self.tile.core_in_output.slices
        first, *others = (cropped(output_BKHW, rows, cols) for output_BKHW in outputs_BKHW)
        return Piece(first, self.tile.core, self.tile.core.relative_to(self.part.core), tuple(others))


class Shared(NamedTuple):
    """The input of a micro-batch as ranks own it along `rows` and `cols`, this one at `at` (row, col); where the whole
    output begins in the raster; the tile's place in the image, where it is only a part of it."""

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


class HaloMode(Protocol):
    """One way to run a network on the images of one list of tilings."""

    @property
    def network(self) -> GraphNetwork:
        """The network whose layers run, of which a stage holds its own."""

    def share(self, step: Sequence[TileReference | DrawnTile]) -> tuple[Part, ...]:
        """This rank's parts of a step, the same for all calls with the same step. No communication. The stages of a
        pipeline share their parts."""

    @property
    def device(self) -> torch.device:
        """Where the network runs."""

    def micro_batches(self, part: Part) -> tuple[MicroBatch, ...]:
        """What the network runs on, one after the other, for a part."""

    def inputs(self, sample: Sample) -> Iterator[torch.Tensor]:
        """The network's input for each micro-batch of a loaded part. Collective over the ranks of its image in mode
        `exchange`: with stages, over those of the first one."""

    def run_nodes(self, micro_batch: MicroBatch, tensors: Tensors, first: int, stop: int) -> None:
        """Nodes `first` to `stop` on a micro-batch, as `GraphNetwork.run_nodes`. Collective over the ranks of its image
        and stage in mode `layer`."""

    def shapes(self, micro_batch: MicroBatch) -> tuple[tuple[int, int, int], ...]:
        """(channels, height, width) of each tensor of the graph on a micro-batch, of this rank's block of it."""

    def speaks(self, parts: Sequence[Part]) -> bool:
        """Whether this rank's buffers count, after a step in which it had `parts`, where ranks agree on theirs."""
