"""A branch of a pyramid: means of parts of the image, layers on these few, and back to the size of the image.

Each rank adds up what it owns of each part; one sum over the ranks gives the means to all, and all compute the layers
on them, which are as many as bins. Then each makes its own block of the output, by weights from places in the image.
The layers' gradients are a rank's share, as of any layer; those of the means are summed once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tiledseg.geometry.box import Interval
from tiledseg.geometry.pyramid import PooledBranch as Geometry
from tiledseg.geometry.pyramid import bins_of
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace, gradient_of_part, part_of, whole_place
from tiledseg.models.layers.upsample import Resampled, dim_taps
from tiledseg.models.network import run_nodes
from tiledseg.models.normalise import Ranks, summed
from tiledseg.models.sending import sent


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
        shares = [_shares(dim, layer.bins) for dim, layer in dims]
        means_BCHW: torch.Tensor = _Means.apply(x_BCHW, place.owned(x_BCHW), shares[0], shares[1], ranks)
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


def _shares(dim: DimPlace, bins: int) -> torch.Tensor:
    """Return the weight of each owned position in each bin's mean: shape (bins, positions), float64."""
    own, found = dim.owned, torch.zeros(bins, dim.owned.size, dtype=torch.float64)
    for index, part in enumerate(bins_of(dim.sizes[0], bins)):
        found[index, part.clip(own).relative_to(own.start).slice] = 1 / part.size
    return found


class _Means(torch.autograd.Function):
    """The means over ranks. Sums are float64."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: torch.Tensor,
        owned: tuple[slice, ...] | None,
        rows: torch.Tensor,
        cols: torch.Tensor,
        ranks: Ranks | None,
    ) -> torch.Tensor:
        own_BCHW = part_of(x_BCHW, owned)
        each = [_row_sum(own_BCHW, share) for share in rows]  # whose places are read on the host
        rows, cols = sent(rows, x_BCHW.device), sent(cols, x_BCHW.device)
        ctx.owned, ctx.ranks, ctx.rows, ctx.cols, ctx.shape = owned, ranks, rows, cols, x_BCHW.shape
        means_BCHW = torch.stack(each, dim=2) @ cols.T
        return summed(means_BCHW, ranks).to(x_BCHW.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[Any, ...]:
        wide_BCHW = g_BCHW.double().contiguous()
        summed(wide_BCHW, ctx.ranks)
        by_columns_BCHW = (wide_BCHW @ ctx.cols).to(g_BCHW.dtype)
        own_dx_BCHW = ctx.rows.T.to(g_BCHW.dtype) @ by_columns_BCHW
        return gradient_of_part(own_dx_BCHW, ctx.owned, ctx.shape), None, None, None, None


def _row_sum(x_BCHW: torch.Tensor, share_H: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over rows, of which only a run counts, all alike: shape (B, C, W), float64."""
    counted = share_H.nonzero()[:, 0]
    if not len(counted):
        return x_BCHW.new_zeros(*x_BCHW.shape[:2], x_BCHW.shape[3], dtype=torch.float64)
    first, last = int(counted[0]), int(counted[-1])
    return x_BCHW[:, :, first : last + 1].sum(2, dtype=torch.float64) * share_H[first]
