"""Halo modes: three ways for a rank to get the halos of its pixels, with the same result.

- `read`: a rank computes any tiles and reads their contexts from the raster;
- `exchange`: a rank owns a block of an image's tiles, reads only the block, and gets the halo of the input from its
  neighbours once; then it computes tile by tile as in `read`;
- `layer`: the ranks of an image compute every layer together, each its block, and exchange thin halos between layers.

A mode defines a rank's parts of a step, the network's inputs for each part, and how its layers run on them. Passes
(`part_passes`, `pipeline_passes`) run the network and turn each loaded part into pieces: outputs on the pixels that the
rank owns, for training, validation and prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiledseg.comm.mesh import Axes, Mesh
from tiledseg.execution.carrying import autocast, network_input
from tiledseg.geometry.box import Box
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, context_exchange, decompose
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tile, Tiling, batches, deal
from tiledseg.models.layers.block import cropped, tile_places
from tiledseg.models.network import GraphNetwork, Tensors
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.draws import Draw
from tiledseg.raster.samples.sampling import TileReference

if TYPE_CHECKING:
    from tiledseg.models.compiled import CompiledNetwork
    from tiledseg.spatial.network import SpatialNetwork


class Part(NamedTuple):
    """The unit that a rank loads: a tile or a block of an image, augmented by `draw` if given."""

    image: int
    tile: Tile
    draw: Draw | None = None


class MicroBatch(NamedTuple):
    """The unit on which the network runs, the micro-batch of a pipeline: a tile of a part, or all of it."""

    image: int
    tile: Tile
    part: Tile

    def piece(self, *outputs_BKHW: torch.Tensor) -> Piece:
        """Return the network's outputs on the pixels that the micro-batch owns."""
        rows, cols = self.tile.core_in_output.slices
        first, *others = (cropped(output_BKHW, rows, cols) for output_BKHW in outputs_BKHW)
        return Piece(first, self.tile.core, self.tile.core.relative_to(self.part.core), tuple(others))


class Shared(NamedTuple):
    """The input of a micro-batch, cut over ranks by `rows` and `cols`; this rank is at `at` (row, col). `output`: its
    start is that of the whole output in the raster. `where`: the tile's place if it is only a part of the image."""

    rows: Partition
    cols: Partition
    at: tuple[int, int]
    output: Box
    where: tuple[Box, Box] | None


@dataclass(frozen=True)
class Piece:
    """The network's output on pixels that this rank owns: `core` in raster positions, `in_part` in the part's core.
    `others`: the network's further outputs on them, in training."""

    logits_BKHW: torch.Tensor
    core: Box
    in_part: Box
    others: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class ReadMode:
    """The mode `read`: tiles are dealt to ranks (with stages, to pipelines) by their size, from any place. `batch`: the
    most tiles of one shape that run at once."""

    network: GraphNetwork
    mesh: Mesh
    tilings: tuple[Tiling, ...]
    precision: str
    axes: Axes | None = None  # of pipelines; None without stages
    batch: int = 1
    compiled: CompiledNetwork | None = None  # for passes with gradients

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        """Return this rank's parts of a step; stages of a pipeline have the same. Does not communicate."""
        dealt = self.dealt(step)
        if self.axes is None:
            return dealt[self.mesh.rank]
        at = self.axes.position
        return () if at is None else dealt[at.replica]

    def dealt(self, step: Sequence[TileReference]) -> tuple[tuple[Part, ...], ...]:
        """Return the parts of each rank; with stages, of each pipeline."""
        tiles = [Part(r.image, self._tile(r), r.draw) for r in step]
        owners = self.mesh.size if self.axes is None else self.axes.shape.replicas
        contexts = [part.tile.context.shape for part in tiles]
        shares = deal(contexts, owners, self.batch, in_runs=self.network.graph.is_untraced)
        return tuple(tuple(tiles[number] for number in share) for share in shares)

    def _tile(self, reference: TileReference) -> Tile:
        tile = reference.tile
        return tile if isinstance(tile, Tile) else self.tilings[reference.image].tiles[tile]

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def micro_batches(self, part: Part) -> tuple[MicroBatch, ...]:
        return (MicroBatch(part.image, part.tile, part.tile),)

    def batch_sizes(self, parts: Sequence[Part]) -> list[int]:
        """Return the numbers of micro-batches that run at once, in order: at most `batch` of one shape."""
        shapes = [one.tile.context.shape for part in parts for one in self.micro_batches(part)]
        counts = (len(list(alike)) for _, alike in groupby(shapes))
        return [min(self.batch, count - first) for count in counts for first in range(0, count, self.batch)]

    def inputs(self, sample: Sample) -> Iterator[torch.Tensor]:
        """Yield the network's input for each micro-batch of a loaded part. In mode `exchange` collective over the ranks
        of its image; with stages, over those of the first stage."""
        yield network_input(sample, self.mesh.device, self.network.graph.is_untraced)

    def run_nodes(self, micro_batch: MicroBatch, tensors: Tensors, first: int, stop: int) -> None:
        """Run nodes `first` to `stop` on a micro-batch. In mode `layer` collective over the image's ranks of a
        stage."""
        places = tile_places(self.network.graph, self.whole(micro_batch), micro_batch.tile.context)
        with autocast(self.precision, self.mesh.device):
            if self.compiled is not None and torch.is_grad_enabled():
                self.compiled.run_nodes(tensors)
            else:
                self.network.run_nodes(tensors, first, stop, places)

    def whole(self, micro_batch: MicroBatch) -> Box:
        """Return the network's input on the whole raster of a tile."""
        return micro_batch.tile.whole or self.tilings[micro_batch.image].whole

    def shared(self, micro_batch: MicroBatch) -> Shared:
        """Return the cut of a micro-batch over the ranks of its image: here one rank has all of it."""
        tile = micro_batch.tile
        rows, cols = (Partition((0, size)) for size in tile.context.shape)
        return Shared(rows, cols, (0, 0), tile.output, (self.whole(micro_batch), tile.context))

    def shapes(self, micro_batch: MicroBatch) -> tuple[tuple[int, int, int], ...]:
        """Return (channels, height, width) of this rank's block of each tensor of the graph on a micro-batch."""
        return tensor_shapes(self.network.graph, self.network.bands, *micro_batch.tile.context.shape)

    def speaks(self, parts: Sequence[Part]) -> bool:
        """Return True if this rank's buffers count in `agreement.agree_on_buffers` after a step with `parts`."""
        return len(parts) > 0


class ExchangeMode(ReadMode):
    """The mode `exchange`: the input's halo comes from the neighbours; then tile by tile as in mode `read`."""

    axes: Axes

    @cached_property
    def _images(self) -> tuple[Decomposition, ...]:
        return tuple(decompose(tiling, (self.axes.shape.rows, self.axes.shape.cols)) for tiling in self.tilings)

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        at = self.axes.position
        if at is None:
            return ()
        own = _images_of(step)[at.replica :: self.axes.shape.replicas]
        return tuple(Part(i, self._images[i].block(at.row, at.col), draw) for i, draw in own)

    def micro_batches(self, part: Part) -> tuple[MicroBatch, ...]:
        return tuple(MicroBatch(part.image, tile, part.tile) for tile in self._tiles(part.image, part.tile.position))

    def inputs(self, sample: Sample) -> Iterator[torch.Tensor]:
        from tiledseg.spatial.halo_exchange import exchanged

        image, at, x_BCHW = self._images[sample.image], sample.tile.position, network_input(sample, self.mesh.device)
        rows, cols = image.context_windows()
        window = Box(rows[at[0]], cols[at[1]]).shift(image.whole.row.start, image.whole.col.start)
        with torch.no_grad():
            window_BCHW = exchanged(x_BCHW, context_exchange(image, at), self.axes)
        for tile in self._tiles(sample.image, at):
            slices = tile.context.relative_to(window).slices
            yield window_BCHW[:, :, *slices].contiguous(memory_format=torch.channels_last)

    def _tiles(self, image: int, at: tuple[int, int]) -> Sequence[Tile]:
        tiles = self._images[image].tiles(*at)
        return tiles if self.batch == 1 else sorted(tiles, key=lambda tile: tile.context.shape)


class LayerMode(ReadMode):
    """The mode `layer`: all ranks of an image run every layer together. Nothing is computed twice (at fusion 1)."""

    def __init__(
        self,
        spatial: SpatialNetwork,
        network: GraphNetwork,
        mesh: Mesh,
        tilings: tuple[Tiling, ...],
        precision: str,
        batch: int = 1,
    ) -> None:
        super().__init__(network, mesh, tilings, precision, batch=batch)
        self.spatial = spatial
        shape = spatial.axes.shape.rows, spatial.axes.shape.cols
        each = {tiling: layer_blocks(tiling, network.graph, shape, spatial.fusion) for tiling in dict.fromkeys(tilings)}
        self._images = tuple(each[tiling] for tiling in tilings)

    def share(self, step: Sequence[TileReference]) -> tuple[Part, ...]:
        at, replicas = self.spatial.axes.position, self.spatial.axes.shape.replicas
        if at is None:
            return ()
        parts = [Part(i, self._images[i].block(at.row, at.col), draw) for i, draw in _images_of(step)]
        return tuple(part for batch in self.batches(parts)[at.replica :: replicas] for part in batch)

    def batches(self, parts: Sequence[Part]) -> list[tuple[Part, ...]]:
        """Return the images of a step in batches that run at once: the same on all ranks of an image, though blocks of
        two images may have one shape on one rank and not on another."""
        images = (self._images[part.image] for part in parts)
        cuts = [(image.rows.edges, image.cols.edges) for image in images]
        return [tuple(parts[number] for number in batch) for batch in batches(cuts, self.batch)]

    def batch_sizes(self, parts: Sequence[Part]) -> list[int]:
        return [len(batch) for batch in self.batches(parts)]

    def run_nodes(self, micro_batch: MicroBatch, tensors: Tensors, first: int, stop: int) -> None:
        image = self._images[micro_batch.image]
        with autocast(self.precision, self.mesh.device):
            self.spatial.run_nodes(tensors, image.rows, image.cols, first, stop)

    def shared(self, micro_batch: MicroBatch) -> Shared:
        image = self._images[micro_batch.image]
        return Shared(image.rows, image.cols, micro_batch.tile.position, image.output, None)

    def norm_together(self, k: int, images: Sequence[tuple[MicroBatch, Tensors]]) -> None:
        """Run node `k`, a batch norm, over all images of a step; `images` are this rank's. Collective over all
        ranks."""
        cuts = [(tensors, self._images[one.image].rows, self._images[one.image].cols) for one, tensors in images]
        with autocast(self.precision, self.mesh.device):
            self.spatial.norm_together(k, cuts, self.spatial.axes.weights, self.mesh.device)

    def no_gradients(self, k: int) -> None:
        """Take part in the backward pass of `norm_together` without an image."""
        self.spatial.no_gradients(k, self.spatial.axes.weights, self.mesh.device)

    def shapes(self, micro_batch: MicroBatch) -> tuple[tuple[int, int, int], ...]:
        image = self._images[micro_batch.image]
        channels = tensor_channels(self.network.graph, self.network.bands)
        blocks = self.spatial.blocks(image.rows, image.cols)
        return tuple((count, *block.shape) for count, block in zip(channels, blocks, strict=True))

    def speaks(self, parts: Sequence[Part]) -> bool:
        """Return True on one rank of an image, since all its ranks have the same statistics."""
        at = self.spatial.axes.position
        return len(parts) > 0 and at is not None and (at.row, at.col) == (0, 0)


def _images_of(step: Sequence[TileReference]) -> list[tuple[int, Draw | None]]:
    return sorted({reference.image: reference.draw for reference in step}.items(), key=lambda image: image[0])
