"""The mean of an image, in every one of its pixels: what a pyramid's image pooling feeds back."""

from __future__ import annotations

from typing import Any

import torch

from tiledseg.geometry.layers.joins import ImageMean
from tiledseg.geometry.layers.layer import Layer
from tiledseg.models.layers.block import BlockModule, Place
from tiledseg.models.normalise import Ranks, Slices


class WholeImageMean(BlockModule):
    """Of each channel the mean over the image, or, `total`, the sum."""

    def __init__(self, total: bool = False) -> None:
        super().__init__()
        self.total = total

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return image_mean(x_BCHW, total=self.total)

    @property
    def description(self) -> Layer:
        return ImageMean(self.total)

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        return image_mean(x_BCHW, place.owned(x_BCHW), None if place.is_whole else ranks, self.total)


def image_mean(
    x_BCHW: torch.Tensor, owned: Slices | None = None, ranks: Ranks | None = None, total: bool = False
) -> torch.Tensor:
    """The mean, or the sum, of the `owned` pixels (None: all) of all ranks, in each pixel of the tensor at hand.

    Sums are float64. Collective over `ranks`, where given, backward too: one call each, of all ranks of the image, in
    the order of the nodes, so it cannot deadlock.
    """
    result: torch.Tensor = _Mean.apply(x_BCHW, owned, ranks, total)
    return result


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, owned: Slices | None, ranks: Ranks | None, total: bool) -> torch.Tensor:
        ctx.owned, ctx.ranks, ctx.shape, ctx.dtype = owned, ranks, x_BCHW.shape, x_BCHW.dtype
        own_BCHW = x_BCHW if owned is None else x_BCHW[owned]
        pixels = own_BCHW.new_full((1,), own_BCHW.shape[2] * own_BCHW.shape[3], dtype=torch.float64)
        sums = torch.cat([own_BCHW.sum((2, 3), dtype=torch.float64).flatten(), pixels])
        _reduce(sums, ranks)
        ctx.pixels = sums.new_ones(()) if total else sums[-1]
        means_BC = (sums[:-1] / ctx.pixels).view(x_BCHW.shape[:2]).to(x_BCHW.dtype)
        return means_BC[:, :, None, None].expand(x_BCHW.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sums_BC = g_BCHW.sum((2, 3), dtype=torch.float64)
        _reduce(sums_BC, ctx.ranks)
        each_BCHW = (sums_BC / ctx.pixels).to(ctx.dtype)[:, :, None, None]
        if ctx.owned is None:
            return each_BCHW.expand(ctx.shape), None, None, None
        dx_BCHW = each_BCHW.new_zeros(ctx.shape)
        dx_BCHW[ctx.owned] = each_BCHW
        return dx_BCHW, None, None, None


def _reduce(sums: torch.Tensor, ranks: Ranks | None) -> None:
    if ranks is not None and ranks.size > 1:
        ranks.all_reduce_sum(sums).wait()
