"""A rank's block of an image as a tile, in the halo modes `exchange` and `layer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, decompose
from tiledseg.geometry.sharing.layer_windows import layer_windows, settle
from tiledseg.geometry.tiling import Tile, Tiling


def exchange_block(decomposition: Decomposition, row: int, col: int) -> Tile:
    """Return the block at (row, col) of the mesh in `exchange` mode: its tiles' cores together, read without a halo."""
    tiles = decomposition.tiles(row, col)
    core, output = (_hull([getattr(tile, name) for tile in tiles]) for name in ("core", "output"))
    return Tile(_index(decomposition, row, col), (row, col), core, decomposition.owned(row, col), output)


@dataclass(frozen=True)
class LayerBlocks:
    """An image spread over a mesh in `layer` mode: how the network's input and output are cut.

    `whole`: the input, in raster positions (mirrored beyond the raster); `output`: the whole output's place there.
    """

    decomposition: Decomposition
    whole: Box
    output: Box
    rows: Partition
    cols: Partition
    output_rows: Partition
    output_cols: Partition

    def tile(self, row: int, col: int) -> Tile:
        """Return the block at (row, col): it reads its part of the input, and owns the pixels that its outputs
        cover."""
        context = Box(self.rows.owned(row), self.cols.owned(col)).shift(self.whole.row.start, self.whole.col.start)
        output = Box(self.output_rows.owned(row), self.output_cols.owned(col))
        output = output.shift(self.output.row.start, self.output.col.start)
        core = output.clip(Box.of_shape(self.decomposition.tiling.raster))
        return Tile(_index(self.decomposition, row, col), (row, col), core, context, output)


def layer_blocks(tiling: Tiling, graph: Graph, shape: tuple[int, int], fusion: int = 1) -> LayerBlocks:
    """Spread a tiling over `shape` (rows, cols) ranks that compute the network together.

    Raises GeometryError where the mesh has more rows or columns than the grid, or a rank would own nothing: of some
    layer's output, or of the raster.
    """
    decomposition = decompose(tiling, shape)
    rows, cols = settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)
    last = graph.results[0] - 1
    dims = (graph, rows), (graph.along_columns, cols)
    outputs = [layer_windows(each, partition, fusion)[last].output for each, partition in dims]
    first = tiling.tiles[0].output
    output = Box(_from(first.row.start, outputs[0].size), _from(first.col.start, outputs[1].size))
    blocks = LayerBlocks(decomposition, decomposition.whole, output, rows, cols, outputs[0], outputs[1])
    for row, col in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        if blocks.tile(row, col).core.area == 0:
            raise GeometryError(
                f"the rank at ({row}, {col}) of {shape[0]} x {shape[1]} would own no pixel of a raster of "
                f"{tiling.raster[0]} x {tiling.raster[1]}; use fewer ranks an image"
            )
    return blocks


def _from(start: int, size: int) -> Interval:
    return Interval(start, start + size)


def _hull(boxes: Sequence[Box]) -> Box:
    hull = boxes[0]
    for box in boxes[1:]:
        hull = Box(hull.row.hull(box.row), hull.col.hull(box.col))
    return hull


def _index(decomposition: Decomposition, row: int, col: int) -> int:
    """Return the number of a block: they count row-major, as tiles do."""
    return row * decomposition.shape[1] + col
