"""A convolution that computes its interior while the halos travel, and its borders once they are there.

The interior are the outputs that read nothing but this rank's own block. In the backward pass the input's gradient
comes first, and the weights' gradient is computed while the halos of the former travel home. What it costs: five
smaller convolutions in place of one, and a copy of the output. Whether it pays depends on the machine; it is measured
in benchmarks/spatial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.sharing.block_exchange import BlockExchange
from tiledseg.models.layers.block import DimPlace, Place
from tiledseg.spatial.halo_exchange import HaloExchanger

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvolutionOptions:
    """As `convolve`, which is `functional.conv2d` or computes the same, takes them; `padding` along dims that are not
    cut only."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    convolve: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class OverlapJob:
    """Everything about one convolution on one rank but its tensors."""

    exchanger: HaloExchanger
    exchange: BlockExchange
    options: ConvolutionOptions
    layers: tuple[Convolution, Convolution]
    place: Place

    @property
    def given(self) -> Box:
        return Box(self.place.row.given, self.place.col.given)

    @property
    def interior(self) -> Box:
        """The outputs that need this rank's own block alone; empty where every output needs a halo."""
        return Box(*(_within(layer, at.given, at.owned) if cut else at.given for layer, at, cut in self._dims()))

    @property
    def own(self) -> Box:
        """What the rank has before the exchange."""
        return Box(*(at.owned if cut else at.read for _, at, cut in self._dims()))

    @property
    def window(self) -> Box:
        """What it has after it."""
        return Box(self.place.row.read, self.place.col.read)

    def _dims(self) -> Iterator[tuple[Convolution, DimPlace, bool]]:
        """Rows and columns, each with whether it travels."""
        travels = (size is not None for size in self.exchange.window)
        return zip(self.layers, (self.place.row, self.place.col), travels, strict=True)

    def borders(self) -> Iterator[Box]:
        """The other outputs, as up to four strips; all of them in one where there is no interior."""
        inner, given = self.interior, self.given
        if not inner.area:
            yield given
            return
        strips = (
            Box(Interval(given.row.start, inner.row.start), given.col),
            Box(Interval(inner.row.stop, given.row.stop), given.col),
            Box(inner.row, Interval(given.col.start, inner.col.start)),
            Box(inner.row, Interval(inner.col.stop, given.col.stop)),
        )
        yield from (strip for strip in strips if strip.area)

    def read(self, out: Box) -> Box:
        """The inputs that the outputs `out` read; along a dim that is not cut all of it, which is padded there."""
        row, col = (
            place.read if place.whole else layer.required_input(part)
            for layer, place, part in zip(
                self.layers, (self.place.row, self.place.col), (out.row, out.col), strict=True
            )
        )
        return Box(row, col)


@lru_cache(maxsize=1024)
def _within(layer: Convolution, out: Interval, own: Interval) -> Interval:
    """Those of the outputs that read nothing but the inputs `own`."""
    inside = [o for o in range(out.start, out.stop) if own.contains(layer.required_input(Interval(o, o + 1)))]
    return Interval(inside[0], inside[-1] + 1) if inside else Interval(out.start, out.start)


class OverlappedConvolution(torch.autograd.Function):
    """y from a rank's own block, with the halo exchange inside. Collective over the ranks of the image."""

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: OverlapJob
    ) -> torch.Tensor:
        flight = job.exchanger.start(x_BCHW, job.exchange, 0.0)
        y_BCHW = _compute(None, x_BCHW, job.own, [job.interior], weight, bias, job)
        window_BCHW = flight.window()
        y_BCHW = _compute(y_BCHW, window_BCHW, job.window, job.borders(), weight, bias, job)
        assert y_BCHW is not None, "a rank gives at least one output"
        ctx.save_for_backward(window_BCHW, weight)
        ctx.job, ctx.has_bias = job, bias is not None
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        window_BCHW, weight = ctx.saved_tensors
        job: OverlapJob = ctx.job
        o = job.options
        dx_BCHW = dweight = dbias = flight = None
        if ctx.needs_input_grad[0]:
            window_gradient_BCHW = conv2d_input(
                window_BCHW.shape, weight, gradient_BCHW, o.stride, o.padding, o.dilation, o.groups
            )
            flight = job.exchanger.start_back(window_gradient_BCHW, job.exchange, owned=True)
        if ctx.needs_input_grad[1]:
            dweight = conv2d_weight(window_BCHW, weight.shape, gradient_BCHW, o.stride, o.padding, o.dilation, o.groups)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = gradient_BCHW.sum((0, 2, 3))
        if flight is not None:
            dx_BCHW = flight.gradient()
        return dx_BCHW, dweight, dbias, None


def _compute(
    y_BCHW: torch.Tensor | None,
    x_BCHW: torch.Tensor,
    at: Box,
    outputs: Iterable[Box],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    job: OverlapJob,
) -> torch.Tensor | None:
    """Puts `outputs`, from a tensor that covers `at`, into y, which is made with the first of them."""
    o = job.options
    for out in outputs:
        if not out.area:
            continue
        rows, cols = job.read(out).relative_to(at).slices
        part_BCHW = o.convolve(x_BCHW[:, :, rows, cols], weight, bias, o.stride, o.padding, o.dilation, o.groups)
        y_BCHW = _output(part_BCHW, job.given) if y_BCHW is None else y_BCHW
        y_BCHW[(slice(None), slice(None), *out.relative_to(job.given).slices)] = part_BCHW
    return y_BCHW


def _output(like_BCHW: torch.Tensor, given: Box) -> torch.Tensor:
    layout = torch.channels_last if like_BCHW.is_contiguous(memory_format=torch.channels_last) else None
    return torch.empty(
        (*like_BCHW.shape[:2], *given.shape),
        dtype=like_BCHW.dtype,
        device=like_BCHW.device,
        memory_format=layout or torch.contiguous_format,
    )
