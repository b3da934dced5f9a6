"""Passes in which each tile, or each rank's part of an image, goes through the network in blocks, segment by segment.

What lies between segments is put on a shelf: in memory, or in a file. See `spatial.blocks.image_pass`. The ranks of an
image in mode `layer` have the same images in the same order, so that they wait for each other in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.watching.doing import doing
from tiledseg.execution.halos.halo_modes import ReadMode
from tiledseg.execution.halos.part import MicroBatch, Part, Piece
from tiledseg.execution.passes.part_passes import Key, Loss, SerialPasses, Timed
from tiledseg.execution.precision import autocast
from tiledseg.geometry.box import Box
from tiledseg.gradients import GradientReducer
from tiledseg.models.cropping import cropped
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.rerun.still import still_statistics
from tiledseg.raster.samples.dataset import Sample
from tiledseg.spatial.blocks.image_pass import BlockPass, Outputs
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import BlockProgram, ImageRanks
from tiledseg.spatial.blocks.store import Shelf


class BlockWork(NamedTuple):
    """How tiles are computed in blocks: at most so many rows and columns of them, which lie on `shelf` in between.
    `axes`: the ranks that share an image."""

    network: BlockNetwork
    blocks: tuple[int, int]
    shelf: Shelf
    axes: Axes


class BlockPasses(SerialPasses):
    """Tile by tile, or image by image, each in blocks; a piece is what a block owns of the outputs."""

    mode: ReadMode
    sends = False

    def __init__(self, mode: ReadMode, work: BlockWork) -> None:
        super().__init__(mode)
        self._work = work

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed = Timed(samples)
        again = self.rounds(parts, loss.looks_first) > 1
        if again:
            with still_statistics([self.mode.network]):
                for sample in islice(timed, len(parts)):
                    for one in self._tiles(sample, key, keep=False):
                        one.look(loss)
            loss.agree()
        for sample in islice(timed, len(parts)):
            for one in self._tiles(sample, key):
                if loss.looks_first and not again:
                    one.look(loss)
                    loss.agree()
                one.train(loss)
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        tiles = sum(len(self.mode.micro_batches(part)) for part in parts)
        return 2 if looks_first and tiles > 1 else 1

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        for sample in samples:
            for one in self._tiles(sample, keep=False):
                yield from ((sample, piece) for piece in one.pieces())

    def pieces(self, parts: Sequence[Part]) -> int:
        return sum(self._count(micro_batch) for part in parts for micro_batch in self.mode.micro_batches(part))

    def _count(self, micro_batch: MicroBatch) -> int:
        place = self._place(micro_batch)
        return sum(place.owned(block) is not None for block in place.program.own)

    def _place(self, micro_batch: MicroBatch) -> _Place:
        shared = self.mode.shared(micro_batch)
        cuts = self._work.network.partitions((shared.rows, shared.cols), self._work.blocks)
        ranks = ImageRanks(shared.rows.parts, shared.cols.parts, shared.at)
        program = self._work.network.program(*cuts, shared.where, ranks)
        return _Place(self._work.network, program, shared.output, micro_batch.tile.core)

    def _bring(self, window_BCHW: torch.Tensor) -> torch.Tensor:
        return window_BCHW.to(self.mode.mesh.device).contiguous(memory_format=torch.channels_last)

    def _cast(self) -> AbstractContextManager[object]:
        return autocast(self.mode.precision, self.mode.mesh.device)

    def _tiles(self, sample: Sample, key: Key | None = None, keep: bool = True) -> Iterator[_Tile]:
        """Of a part each micro-batch, which has gone through all segments but the last."""
        x_BCHW = torch.from_numpy(sample.x_CHW)[None]  # as it is: each window is brought to the device by itself
        if key is not None:
            set_dropout_key(self.mode.network, key(sample.image))
        for micro_batch in self.mode.micro_batches(Part(sample.image, sample.tile)):
            with doing("tile %d of image %d, in blocks", micro_batch.tile.index, sample.image):
                place, work = self._place(micro_batch), self._work
                how = work.shelf, False, self._cast, self._bring, work.axes
                run = BlockPass(work.network, x_BCHW, place.program, *how)
                try:
                    run.forward(keep)
                    yield _Tile(place, sample, micro_batch, run)
                finally:
                    run.close()


class _Place(NamedTuple):
    """Where the blocks of a micro-batch lie: `output` begins where the whole output does in the raster, and the
    micro-batch owns `core` of that."""

    network: BlockNetwork
    program: BlockProgram
    output: Box
    core: Box

    def in_raster(self, block: int) -> Box:
        """What a block makes of the first output."""
        made = self.network.output_box(self.program, block)
        return made.shift(self.output.row.start, self.output.col.start)

    def owned(self, block: int) -> Box | None:
        """What of that the micro-batch owns; None where it owns none."""
        owned = self.in_raster(block).clip(self.core)
        return owned if owned.row.size > 0 and owned.col.size > 0 else None


class _Tile(NamedTuple):
    """A tile, or a rank's part of an image, on its way through the network."""

    place: _Place
    sample: Sample
    micro_batch: MicroBatch
    run: BlockPass

    def pieces(self) -> Iterator[Piece]:
        """The outputs on what each block owns of the tile's core. Without gradients."""
        for block in self.place.program.own:
            owned = self.place.owned(block)
            if owned is not None:
                yield self._piece(block, owned, self.run.outputs(block))

    def look(self, loss: Loss) -> None:
        with torch.no_grad():
            for piece in self.pieces():
                loss.look(piece, self.sample)

    def train(self, loss: Loss) -> None:
        """The backward pass of the loss of all blocks."""

        def of_block(block: int, outputs: Outputs) -> torch.Tensor | None:
            owned = self.place.owned(block)
            if owned is None:
                return None
            return loss([(self._piece(block, owned, outputs), self.sample)])

        self.run.backward(of_block)

    def _piece(self, block: int, owned: Box, outputs: Outputs) -> Piece:
        """`owned`: in raster positions."""
        rows, cols = owned.relative_to(self.place.in_raster(block)).slices
        first, *others = (cropped(output_BKHW, rows, cols) for output_BKHW in outputs)
        return Piece(first, owned, owned.relative_to(self.micro_batch.part.core), tuple(others))
