"""Modules that join inputs or sum over the image. Joined inputs are cropped to the same pixels; a block gets them
cropped."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch.nn import functional

from tiledseg.geometry.layers import joins as geometry
from tiledseg.geometry.layers.joins import ImageMax, ImageMean
from tiledseg.memory.device import sent
from tiledseg.models.layers.block import BlockModule, BlockPlace, cropped
from tiledseg.models.normalise import Ranks, summed

JOINS: dict[type[geometry.Join], Callable[..., torch.Tensor]] = {
    geometry.Concatenate: partial(torch.cat, dim=1),
    geometry.Add: partial(reduce, operator.add),  # in the order of the inputs
    geometry.Multiply: partial(reduce, operator.mul),
}


class JoinModule(BlockModule):
    """A join of inputs, each cropped by its layer's number of pixels a side."""

    def __init__(self, layer: geometry.Join) -> None:
        super().__init__(layer)
        self.crops, self.join = layer.crops, JOINS[type(layer)]

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        sides = ((x_BCHW, slice(crop, -crop or None)) for x_BCHW, crop in zip(inputs_BCHW, self.crops, strict=True))
        return self.join([cropped(x_BCHW, side, side) for x_BCHW, side in sides])

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.join(inputs_BCHW)


class WholeImageMean(BlockModule):
    """The mean of each channel over the image, or with `total` the sum."""

    def __init__(self, total: bool = False) -> None:
        super().__init__(ImageMean(total))
        self.total = total

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        weight = 1.0 if self.total else 1 / (place.row.sizes[0] * place.col.sizes[0])
        shares = torch.ones(1, place.row.owned.size).double() * weight, torch.ones(1, place.col.owned.size).double()
        among = None if place.is_whole else ranks
        return BinMeans.apply(place.own_part(x_BCHW), *shares, among, weight, x_BCHW.shape)


class BinMeans(torch.autograd.Function):
    """The means of bins of an image over ranks, from their own pixels, by the weights of `rows` and `cols`, with
    float64 sums. `weight`: that of each pixel in a single bin, whose mean then fills a tensor of `shape`.

    Collective over `ranks` if given, backward too, in the order of the nodes: it cannot deadlock.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own_BCHW: torch.Tensor,
        rows: torch.Tensor,
        cols: torch.Tensor,
        ranks: Ranks | None,
        weight: float | None,
        shape: torch.Size,
    ) -> torch.Tensor:
        each = []  # weighted sums over rows, of shape (B, C, W), float64; a bin's rows are a run of equal weights
        for weights_H in rows:  # on the host
            counted = weights_H.nonzero()[:, 0].tolist() or [0, -1]
            sums = own_BCHW[:, :, counted[0] : counted[-1] + 1].sum(2, dtype=torch.float64)
            each.append(sums * weights_H[counted[0]])
        rows, cols = sent(rows, own_BCHW.device), sent(cols, own_BCHW.device)
        ctx.ranks, ctx.rows, ctx.cols, ctx.weight = ranks, rows, cols, weight
        ctx.shape, ctx.dtype = own_BCHW.shape, own_BCHW.dtype
        means_BCHW = summed(torch.stack(each, dim=2) @ cols.T, ranks).to(own_BCHW.dtype)
        return means_BCHW if weight is None else means_BCHW.expand(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[Any, ...]:
        if ctx.weight is None:
            wide_BCHW = summed(g_BCHW.double().contiguous(), ctx.ranks)
            dx_BCHW = ctx.rows.T.to(ctx.dtype) @ (wide_BCHW @ ctx.cols).to(ctx.dtype)
        else:
            sums_BC11 = summed(g_BCHW.sum((2, 3), True, dtype=torch.float64), ctx.ranks)
            dx_BCHW = (sums_BC11 * ctx.weight).to(ctx.dtype).expand(ctx.shape)
        return dx_BCHW, None, None, None, None, None


class WholeImageMax(BlockModule):
    """The maximum of each channel over the image. The first of equal pixels, row by row, gets the gradient, as in
    `adaptive_max_pool2d`; with `even` all share it, as in `amax`."""

    def __init__(self, even: bool = False) -> None:
        super().__init__(ImageMax(even))
        self.even = even

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        start, among = (place.row.owned.start, place.col.owned.start), None if place.is_whole else ranks
        return _Max.apply(place.own_part(x_BCHW), start, place.col.sizes[0], among, self.even, x_BCHW.shape)


class _Max(torch.autograd.Function):
    """The maxima over ranks. Each rank puts its own maxima, with the place of the first (`even`: the count), into its
    slot of a small tensor. The sum over the ranks holds all slots. Backward sums gradients, as a mean does."""

    @staticmethod
    def forward(
        ctx: Any,
        own_BCHW: torch.Tensor,
        start: tuple[int, int],
        width: int,
        ranks: Ranks | None,
        even: bool,
        shape: torch.Size,
    ) -> torch.Tensor:
        values_BC11, found_BC11 = functional.adaptive_max_pool2d(own_BCHW, 1, return_indices=True)
        row, col = found_BC11 // own_BCHW.shape[3] + start[0], found_BC11 % own_BCHW.shape[3] + start[1]
        first_BC11 = row * width + col
        last = (own_BCHW == values_BC11).sum((2, 3), keepdim=True) if even else first_BC11
        most_BC11, chosen_BC11 = _chosen(values_BC11, last, ranks, even)
        ctx.ranks, ctx.shape, ctx.even = ranks, own_BCHW.shape, even
        if even:
            ctx.save_for_backward(own_BCHW, most_BC11, chosen_BC11)
        else:
            mine = (chosen_BC11 == first_BC11) & (most_BC11 == values_BC11)
            ctx.save_for_backward(found_BC11, mine)
        return most_BC11.expand(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[Any, ...]:
        sums_BC11 = g_BCHW.sum((2, 3), dtype=torch.float64, keepdim=True)
        summed(sums_BC11, ctx.ranks)
        if ctx.even:
            own_BCHW, most_BC11, count_BC11 = ctx.saved_tensors
            dx_BCHW = (own_BCHW == most_BC11) * (sums_BC11 / count_BC11).to(g_BCHW.dtype)
        else:
            found_BC11, mine_BC11 = ctx.saved_tensors
            flat = g_BCHW.new_zeros(*ctx.shape[:2], ctx.shape[2] * ctx.shape[3])
            flat.scatter_(2, found_BC11.flatten(2), (sums_BC11 * mine_BC11).to(g_BCHW.dtype).flatten(2))
            dx_BCHW = flat.unflatten(2, ctx.shape[2:])
        return dx_BCHW, None, None, None, None, None


def _chosen(
    values: torch.Tensor, last: torch.Tensor, ranks: Ranks | None, even: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values over all ranks, with the count of pixels that have them (`even`) or the first place."""
    if ranks is None or ranks.size == 1:
        return values, last.double()
    slots = torch.zeros(ranks.size, 2, *values.shape, dtype=torch.float64, device=values.device)
    slots[ranks.rank, 0], slots[ranks.rank, 1] = values.double(), last.double()
    summed(slots, ranks)
    most = slots[:, 0].amax(0)
    has = slots[:, 0] == most
    if even:
        return most.to(values.dtype), (slots[:, 1] * has).sum(0)
    return most.to(values.dtype), slots[:, 1].masked_fill(~has, float("inf")).amin(0)
