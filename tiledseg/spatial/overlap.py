"""A convolution that computes its interior while the halos travel, and its borders once they are there.

The interior are the outputs that read nothing but this rank's own block. In the backward pass the input's gradient
comes first, and the weights' gradient is computed while the halos of the former travel home. It costs five smaller
convolutions in place of one, and a copy of the output. The gain depends on the machine (`benchmarks/spatial`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.sharing.decomposition import BlockExchange
from tiledseg.models.layers.block import BlockPlace
from tiledseg.spatial.halo_exchange import HaloExchanger

Pair = tuple[int, int]


@dataclass(frozen=True)
class OverlapJob:
    """Everything about one convolution on one rank but its tensors. `convolve` takes the `options` (stride, padding,
    dilation, groups) as `functional.conv2d` does; padding along dims that are not cut only."""

    exchanger: HaloExchanger
    exchange: BlockExchange
    layers: tuple[Convolution, Convolution]
    place: BlockPlace
    convolve: Callable[..., torch.Tensor]
    options: tuple[Pair, Pair, Pair, int]

    @property
    def given(self) -> Box:
        return Box(self.place.row.given, self.place.col.given)

    @property
    def window(self) -> Box:
        """The inputs after the exchange."""
        return Box(self.place.row.read, self.place.col.read)

    def own(self) -> tuple[Box, Box]:
        """Return the inputs before the exchange, and the outputs that need these alone: none where every output needs
        a halo."""
        dims = list(zip(self.exchange.window, self.layers, (self.place.row, self.place.col), strict=True))
        inputs = (at.read if size is None else at.owned for size, _, at in dims)
        outputs = (at.given if size is None else _within(layer, at.given, at.owned) for size, layer, at in dims)
        return Box(*inputs), Box(*outputs)

    def borders(self, inner: Box) -> list[Box]:
        """Return the outputs around the interior as up to four strips; all in one where there is no interior."""
        given = self.given
        if not inner.area:
            return [given]
        strips = (
            Box(Interval(given.row.start, inner.row.start), given.col),
            Box(Interval(inner.row.stop, given.row.stop), given.col),
            Box(inner.row, Interval(given.col.start, inner.col.start)),
            Box(inner.row, Interval(inner.col.stop, given.col.stop)),
        )
        return [strip for strip in strips if strip.area]

    def compute(
        self,
        out: Box,
        x_BCHW: torch.Tensor,
        at: Box,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        y_BCHW: torch.Tensor | None,
    ) -> torch.Tensor:
        """Put the outputs `out`, from inputs that cover `at`, into y, and return y, which is made where it is None."""
        dims = zip(self.layers, (self.place.row, self.place.col), (out.row, out.col), strict=True)
        rows, cols = (dim.read if dim.whole else layer.required_input(part) for layer, dim, part in dims)
        read = Box(rows, cols).relative_to(at)
        part_BCHW = self.convolve(x_BCHW[:, :, read.row.slice, read.col.slice], weight, bias, *self.options)
        if y_BCHW is None:
            last = part_BCHW.is_contiguous(memory_format=torch.channels_last)
            layout = torch.channels_last if last else torch.contiguous_format
            shape = *part_BCHW.shape[:2], *self.given.shape
            y_BCHW = torch.empty(shape, dtype=part_BCHW.dtype, device=part_BCHW.device, memory_format=layout)
        y_BCHW[(slice(None), slice(None), *out.relative_to(self.given).slices)] = part_BCHW
        return y_BCHW


@lru_cache(maxsize=1024)
def _within(layer: Convolution, out: Interval, own: Interval) -> Interval:
    """Return those of the outputs that read nothing but the inputs `own`."""
    inside = [o for o in range(out.start, out.stop) if own.contains(layer.required_input(Interval(o, o + 1)))]
    return Interval(inside[0], inside[-1] + 1) if inside else Interval(out.start, out.start)


class OverlappedConvolution(torch.autograd.Function):
    """A convolution of a rank's own block, with the halo exchange inside. Collective over the ranks of the image."""

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: OverlapJob
    ) -> torch.Tensor:
        flight = job.exchanger.start(x_BCHW, job.exchange, 0.0)
        own, interior = job.own()
        y_BCHW = job.compute(interior, x_BCHW, own, weight, bias, None) if interior.area else None
        window_BCHW = flight.window()
        for out in job.borders(interior):
            y_BCHW = job.compute(out, window_BCHW, job.window, weight, bias, y_BCHW)
        assert y_BCHW is not None, "a rank gives at least one output"
        ctx.save_for_backward(window_BCHW, weight)
        ctx.job = job
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        window_BCHW, weight = ctx.saved_tensors
        job: OverlapJob = ctx.job
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dweight = flight = None
        if wants_input:
            window_gradient_BCHW = conv2d_input(window_BCHW.shape, weight, g_BCHW, *job.options)
            flight = job.exchanger.start_back(window_gradient_BCHW, job.exchange, owned=True)
        if wants_weight:
            dweight = conv2d_weight(window_BCHW, weight.shape, g_BCHW, *job.options)
        dbias = g_BCHW.sum((0, 2, 3)) if wants_bias else None
        return None if flight is None else flight.gradient(), dweight, dbias, None
