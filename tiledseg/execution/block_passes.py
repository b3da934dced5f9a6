"""Passes that compute each tile, or each rank's part of an image, in blocks, segment by segment. With a training batch
norm all images of a step go together.

Tensors between segments lie on a shelf, in memory or a file. `spatial.block_pass` says why it cannot deadlock. In mode
`layer` the ranks of an image have the same images in the same order, and so wait for each other in one order. If the
images of a step go together, a rank without one takes part in all sums of the norms, and in that of a loss that looks
first, between the forward and the backward sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.doing import doing
from tiledseg.comm.mesh import Axes
from tiledseg.execution.carrying import autocast
from tiledseg.execution.halo_modes import MicroBatch, Part, Piece, ReadMode
from tiledseg.execution.part_passes import Key, Loss, Passes
from tiledseg.geometry.box import Box
from tiledseg.gradients import GradientReducer
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.models.dropout import dropouts, set_dropout_key
from tiledseg.models.layers.block import cropped
from tiledseg.raster.samples.dataset import Sample
from tiledseg.spatial.block_network import BlockNetwork, BlockProgram, ImageRanks
from tiledseg.spatial.block_pass import BlockPass, Together
from tiledseg.spatial.image_pass import Image, ImagePass, Outputs


class BlockWork(NamedTuple):
    """Settings of passes in blocks. `blocks`: at most so many (rows, cols) a tile, which lie on `shelf` between
    segments. `axes`: the ranks that share an image."""

    network: BlockNetwork
    blocks: tuple[int, int]
    shelf: MemoryShelf
    axes: Axes


class BlockTile(NamedTuple):
    """A micro-batch (a tile, or a rank's part) in blocks. `output`: its start is that of the whole output in the
    raster."""

    network: BlockNetwork
    program: BlockProgram
    output: Box
    micro_batch: MicroBatch

    def _in_raster(self, block: int) -> Box:
        """Return the box of a block's first output, in raster positions."""
        made = self.program.box(self.network.graph.results[0], block)
        return made.shift(self.output.row.start, self.output.col.start)

    def owns(self, block: int) -> bool:
        return self._in_raster(block).clip(self.micro_batch.tile.core).area > 0

    def piece(self, block: int, outputs: Outputs) -> Piece:
        """Return the outputs on the pixels of a block that the micro-batch owns."""
        made = self._in_raster(block)
        owned = made.clip(self.micro_batch.tile.core)
        first, *others = (cropped(output_BKHW, *owned.relative_to(made).slices) for output_BKHW in outputs)
        return Piece(first, owned, owned.relative_to(self.micro_batch.part.core), tuple(others))


Running = Sequence[tuple[BlockTile, Sample, ImagePass]]


class BlockPasses(Passes):
    """Passes tile by tile, or image by image, each in blocks; each block gives a piece. `together`: in training all
    images of a step go through each segment together, for a batch norm over all of them."""

    sends = False

    def __init__(self, mode: ReadMode, work: BlockWork, together: bool = False) -> None:
        self.mode = mode
        self._work = work
        self._together = Together(work.axes.weights, mode.mesh.device) if together else None
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each image sets their key before its blocks

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> None:
        groups = self._groups(parts)
        again = self.rounds(parts, loss.looks_first) > 1
        if again:
            self._look((one for count in groups for one in self._outputs(islice(samples, count), key)), loss)
        for count in groups:
            with self._under_way(islice(samples, count), key) as (run, running):
                if loss.looks_first and not again:
                    with torch.no_grad():  # a block updates running statistics in this, its first run
                        for piece, sample in _pieces(running):
                            loss.look(piece, sample)
                    loss.agree()

                def loss_of(tile: BlockTile, sample: Sample, block: int, outputs: Outputs) -> torch.Tensor | None:
                    return loss([(tile.piece(block, outputs), sample)]) if tile.owns(block) else None

                run.backward(*(partial(loss_of, tile, sample) for tile, sample, _ in running))

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and len(self._groups(parts)) > 1 else 1

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Piece, Sample]]:
        for sample in samples:
            yield from self._outputs([sample])

    def _outputs(self, samples: Iterable[Sample], key: Key | None = None) -> Iterator[tuple[Piece, Sample]]:
        with self._under_way(samples, key, keep=False) as (_, running):
            yield from _pieces(running)

    def pieces(self, parts: Sequence[Part]) -> int:
        tiles = map(self._tile, self._micro_batches(parts))
        return sum(sum(map(tile.owns, tile.program.own)) for tile in tiles)

    def _groups(self, parts: Sequence[Part]) -> list[int]:
        """Return the numbers of parts that go together, in order."""
        return [len(parts)] if self._together else [1] * len(parts)

    def _tile(self, micro_batch: MicroBatch, together: bool = False) -> BlockTile:
        shared = self.mode.shared(micro_batch)
        cuts = self._work.network.partitions((shared.rows, shared.cols), self._work.blocks)
        ranks = ImageRanks(shared.rows.parts, shared.cols.parts, shared.at)
        program = self._work.network.program(*cuts, shared.where, ranks, together)
        return BlockTile(self._work.network, program, shared.output, micro_batch)

    @contextmanager
    def _under_way(
        self, samples: Iterable[Sample], key: Key | None = None, keep: bool = True
    ) -> Iterator[tuple[BlockPass, Running]]:
        """Run samples through all segments but the last. `key`: given in training."""
        together = None if key is None else self._together
        own = list(samples)
        batches = [self.mode.micro_batches(Part(sample.image, sample.tile))[0] for sample in own]
        tiles = [self._tile(micro_batch, together is not None) for micro_batch in batches]
        what = f"a step of {len(own)} images" if together else f"tile {own[0].tile.index} of image {own[0].image}"
        with doing("%s, in blocks", what):
            images = []
            for sample, tile in zip(own, tiles, strict=True):
                x_BCHW = torch.from_numpy(sample.x_CHW)[None]  # windows are moved to the device one by one
                begin = () if key is None else (partial(set_dropout_key, self._dropouts, key(sample.image)),)
                images.append(Image(x_BCHW, tile.program, *begin))
            device = self.mode.mesh.device

            def bring(window_BCHW: torch.Tensor) -> torch.Tensor:
                return window_BCHW.to(device).contiguous(memory_format=torch.channels_last)

            cast = partial(autocast, self.mode.precision, device)
            how = self._work.shelf, False, cast, bring, self._work.axes, together
            run = BlockPass(self._work.network, images, *how)
            try:
                run.forward(keep)
                yield run, list(zip(tiles, own, run.images, strict=True))
            finally:
                run.close()


def _pieces(running: Running) -> Iterator[tuple[Piece, Sample]]:
    """Yield the piece of each block of each tile, without gradients."""
    for tile, sample, blocks in running:
        for block in tile.program.own:
            if tile.owns(block):
                yield tile.piece(block, blocks.outputs(block)), sample
