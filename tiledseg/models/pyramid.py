"""A branch of a pyramid: means of parts of the image, layers on these few, and back to the size of the image.

Each rank adds up what it owns of each part; one sum over the ranks gives the means to all, and all compute the layers
on them, which are as many as bins. Then each makes its own block of the output, by weights from places in the image.
The layers' gradients are a rank's share, as of any layer; those of the means are summed once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tiledseg.geometry.box import Interval
from tiledseg.geometry.pyramid import PooledBranch as Geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace, whole_place
from tiledseg.models.layers.joins import BinMeans, bin_weights
from tiledseg.models.layers.resampling import Resampled, dim_taps
from tiledseg.models.network import run_nodes
from tiledseg.models.normalise import Ranks


class PooledBranchModule(BlockModule):
    """See `geometry.pyramid.PooledBranch`; `modules` are the inner nodes'."""

    rows: Geometry
    cols: Geometry

    def __init__(self, rows: Geometry, cols: Geometry, modules: Sequence[nn.Module]) -> None:
        super().__init__(rows, cols)
        self.inner = nn.ModuleList(modules)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self._branch(whole_place(x_BCHW, (self.rows.factor, self.cols.factor)), None, x_BCHW)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Collective over `ranks`, backward too: one call each, of all ranks of the image, in the order of the nodes,
        so it cannot deadlock."""
        return self._branch(place, None if place.is_whole else ranks, x_BCHW)

    def _branch(self, place: BlockPlace, ranks: Ranks | None, x_BCHW: torch.Tensor) -> torch.Tensor:
        dims = (place.row, self.rows), (place.col, self.cols)
        shares = (bin_weights(dim, layer.bins) for dim, layer in dims)
        means_BCHW: torch.Tensor = BinMeans.apply(x_BCHW, place.owned(x_BCHW), *shares, ranks, None)
        tensors, graph = {0: means_BCHW}, self.rows.inner
        run_nodes(graph, lambda k, inputs: self.inner[k](*inputs), tensors, 0, len(graph))
        made_BCHW = tensors[graph.results[0]]
        taps = [
            dim_taps(Interval(0, size), dim.given, (size, dim.sizes[1]), "aligned" if self.rows.aligned else "bilinear")
            for (dim, _), size in zip(dims, made_BCHW.shape[2:], strict=True)
        ]
        layout = torch.channels_last if x_BCHW.is_contiguous(memory_format=torch.channels_last) else None
        made_BCHW = made_BCHW.contiguous(memory_format=layout or torch.contiguous_format)
        result: torch.Tensor = Resampled.apply(made_BCHW, *taps)
        return result
