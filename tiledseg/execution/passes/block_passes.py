"""Passes in which each tile, or each rank's part of an image, goes through the network in blocks, segment by segment;
while training with a batch norm that learns all those of a step together.

What lies between segments is put on a shelf: in memory, or in a file. See `spatial.blocks.block_pass`, also for why it
cannot deadlock. The ranks of an image in mode `layer` have the same images in the same order, so that they wait for
each other in one order. Where the images of a step go together, a rank without one takes part in all sums of the norms,
and in that of a loss that looks first, which lies between the forward and the backward ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.axes import Axes
from tiledseg.comm.watching.doing import doing
from tiledseg.execution.halos.halo_modes import ReadMode
from tiledseg.execution.halos.part import MicroBatch, Part, Piece
from tiledseg.execution.passes.part_passes import Key, Loss, SerialPasses, TimedSamples
from tiledseg.execution.precision import autocast
from tiledseg.geometry.box import Box
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import dropouts, set_dropout_key
from tiledseg.models.layers.block import cropped
from tiledseg.models.notes import still_statistics
from tiledseg.raster.samples.dataset import Sample
from tiledseg.spatial.blocks.block_pass import BlockPass, Image, ImagePass, Outputs
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import BlockProgram, ImageRanks
from tiledseg.spatial.blocks.statistics import Together
from tiledseg.spatial.blocks.store import Shelf


class BlockWork(NamedTuple):
    """How tiles are computed in blocks: at most so many rows and columns of them, which lie on `shelf` in between.
    `axes`: the ranks that share an image."""

    network: BlockNetwork
    blocks: tuple[int, int]
    shelf: Shelf
    axes: Axes


class BlockPasses(SerialPasses):
    """Tile by tile, or image by image, each in blocks; a piece is what a block owns of the outputs. `together`: while
    training all of a step go segment by segment, since a batch norm sees all of them."""

    mode: ReadMode
    sends = False

    def __init__(self, mode: ReadMode, work: BlockWork, together: bool = False) -> None:
        super().__init__(mode)
        self._work = work
        self._together = Together(work.axes.weights, mode.mesh.device) if together else None
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each image tells them before its blocks are computed

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed, groups = TimedSamples(samples), self._groups(parts)
        again = self.rounds(parts, loss.looks_first) > 1
        if again:
            with still_statistics([self.mode.network]):
                for count in groups:
                    with self._under_way(islice(timed, count), key, keep=False) as run:
                        run.look(loss)
            loss.agree()
        for count in groups:
            with self._under_way(islice(timed, count), key) as run:
                if loss.looks_first and not again:
                    run.look(loss)
                    loss.agree()
                run.train(loss)
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and len(self._groups(parts)) > 1 else 1

    def _groups(self, parts: Sequence[Part]) -> list[int]:
        """How many of the parts go at once."""
        return [len(parts)] if self._together else [1] * len(parts)

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        for sample in samples:
            with self._under_way([sample], keep=False) as run:
                for tile in run.tiles:
                    yield from ((sample, piece) for piece in tile.pieces())

    def pieces(self, parts: Sequence[Part]) -> int:
        return sum(self._count(micro_batch) for part in parts for micro_batch in self.mode.micro_batches(part))

    def _count(self, micro_batch: MicroBatch) -> int:
        place = self._place(micro_batch)
        return sum(place.owned(block) is not None for block in place.program.own)

    def _place(self, micro_batch: MicroBatch, together: bool = False) -> _Place:
        shared = self.mode.shared(micro_batch)
        cuts = self._work.network.partitions((shared.rows, shared.cols), self._work.blocks)
        ranks = ImageRanks(shared.rows.parts, shared.cols.parts, shared.at)
        program = self._work.network.program(*cuts, shared.where, ranks, together)
        return _Place(self._work.network, program, shared.output, micro_batch.tile.core)

    def _bring(self, window_BCHW: torch.Tensor) -> torch.Tensor:
        return window_BCHW.to(self.mode.mesh.device).contiguous(memory_format=torch.channels_last)

    def _cast(self) -> AbstractContextManager[object]:
        return autocast(self.mode.precision, self.mode.mesh.device)

    @contextmanager
    def _under_way(self, samples: Iterable[Sample], key: Key | None = None, keep: bool = True) -> Iterator[_UnderWay]:
        """Samples that have gone through all segments but the last; with a `key` they are trained on."""
        together = None if key is None else self._together
        own = list(samples)
        parts = [self.mode.micro_batches(Part(sample.image, sample.tile)) for sample in own]
        places = [self._place(micro_batch, together is not None) for (micro_batch,) in parts]
        what = f"a step of {len(own)} images" if together else f"tile {own[0].tile.index} of image {own[0].image}"
        with doing("%s, in blocks", what):
            images = [self._image(sample, place, key) for sample, place in zip(own, places, strict=True)]
            how = self._work.shelf, False, self._cast, self._bring, self._work.axes, together
            run = BlockPass(self._work.network, images, *how)
            try:
                run.forward(keep)
                tiles = zip(places, own, (one for (one,) in parts), run.images, strict=True)
                yield _UnderWay(run, [_Tile(*tile) for tile in tiles])
            finally:
                run.close()

    def _image(self, sample: Sample, place: _Place, key: Key | None) -> Image:
        x_BCHW = torch.from_numpy(sample.x_CHW)[None]  # as it is: each window is brought to the device by itself
        if key is None:
            return Image(x_BCHW, place.program)
        return Image(x_BCHW, place.program, partial(set_dropout_key, self._dropouts, key(sample.image)))


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
    blocks: ImagePass

    def pieces(self) -> Iterator[Piece]:
        """The outputs on what each block owns of the tile's core. Without gradients."""
        for block in self.place.program.own:
            owned = self.place.owned(block)
            if owned is not None:
                yield self._piece(block, owned, self.blocks.outputs(block))

    def loss(self, loss: Loss, block: int, outputs: Outputs) -> torch.Tensor | None:
        """Of a block; None where the tile owns none of it."""
        owned = self.place.owned(block)
        return None if owned is None else loss([(self._piece(block, owned, outputs), self.sample)])

    def _piece(self, block: int, owned: Box, outputs: Outputs) -> Piece:
        """`owned`: in raster positions."""
        rows, cols = owned.relative_to(self.place.in_raster(block)).slices
        first, *others = (cropped(output_BKHW, rows, cols) for output_BKHW in outputs)
        return Piece(first, owned, owned.relative_to(self.micro_batch.part.core), tuple(others))


class _UnderWay(NamedTuple):
    """What goes at once."""

    run: BlockPass
    tiles: list[_Tile]

    def look(self, loss: Loss) -> None:
        with torch.no_grad():
            for tile in self.tiles:
                for piece in tile.pieces():
                    loss.look(piece, tile.sample)

    def train(self, loss: Loss) -> None:
        """The backward pass of the loss of all blocks."""
        self.run.backward(*(partial(tile.loss, loss) for tile in self.tiles))
