"""A convolution that computes its interior while the halos travel, and its borders once they are there.

The interior are the outputs that read nothing but this rank's own block. Where the image is cut both ways its upper
half is computed while rows travel and its lower half while columns do. In the backward pass the input's gradient comes
first, and the weights' gradient is computed while the halos of the former travel home. What it costs: five smaller
convolutions in place of one, and a copy of the output. Whether it pays depends on the machine; it is measured in
benchmarks/spatial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from tiledseg.geometry.box import Box
from tiledseg.geometry.convolutions import Convolution
from tiledseg.geometry.decomposition import WindowExchange
from tiledseg.geometry.interval import Interval
from tiledseg.models.block import DimPlace, Place
from tiledseg.spatial.halo_exchange import HaloExchanger, Phases, complete

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
    rows: WindowExchange | None
    cols: WindowExchange | None
    options: ConvolutionOptions
    layers: tuple[Convolution, Convolution]
    place: Place

    @property
    def given(self) -> Box:
        return Box(self.place.row.given, self.place.col.given)

    @property
    def interior(self) -> Box:
        """The outputs that need this rank's own block alone; empty where every output needs a halo."""
        return Box(
            _interior(self.layers[0], self.place.row, self.rows), _interior(self.layers[1], self.place.col, self.cols)
        )

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


def _interior(layer: Convolution, place: DimPlace, exchange: WindowExchange | None) -> Interval:
    if exchange is None:
        return place.given
    return _within(layer, place.given, exchange.owned)


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
        phases = job.exchanger.gathering(x_BCHW, job.rows, job.cols, 0.0)
        given = job.given
        own = Box(*(e.owned if e is not None else p.read for e, p in _dims(job)))
        y_BCHW: torch.Tensor | None = None
        window_BCHW: torch.Tensor | None = None
        for chunk in _chunks(job):
            window_BCHW = _proceed(phases) if window_BCHW is None else window_BCHW
            part_BCHW = _convolve(x_BCHW, job.read(chunk), own, weight, bias, job.options)
            y_BCHW = _output(part_BCHW, given) if y_BCHW is None else y_BCHW
            y_BCHW[(slice(None), slice(None), *chunk.relative_to(given).slices)] = part_BCHW
        window_BCHW = complete(phases) if window_BCHW is None else window_BCHW
        window = Box(job.place.row.read, job.place.col.read)
        for strip in job.borders():
            part_BCHW = _convolve(window_BCHW, job.read(strip), window, weight, bias, job.options)
            y_BCHW = _output(part_BCHW, given) if y_BCHW is None else y_BCHW
            y_BCHW[(slice(None), slice(None), *strip.relative_to(given).slices)] = part_BCHW
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
        dx_BCHW = dweight = dbias = None
        phases = None
        if ctx.needs_input_grad[0]:
            window_gradient_BCHW = conv2d_input(
                window_BCHW.shape, weight, gradient_BCHW, o.stride, o.padding, o.dilation, o.groups
            )
            phases = job.exchanger.scattering(window_gradient_BCHW, job.rows, job.cols)
            dx_BCHW = _proceed(phases)
        if ctx.needs_input_grad[1]:
            dweight = conv2d_weight(window_BCHW, weight.shape, gradient_BCHW, o.stride, o.padding, o.dilation, o.groups)
        if phases is not None and dx_BCHW is None:
            dx_BCHW = _proceed(phases)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = gradient_BCHW.sum((0, 2, 3))
        if phases is not None and dx_BCHW is None:
            dx_BCHW = complete(phases)
        return dx_BCHW, dweight, dbias, None


def _dims(job: OverlapJob) -> Iterator[tuple[WindowExchange | None, DimPlace]]:
    yield job.rows, job.place.row
    yield job.cols, job.place.col


def _proceed(phases: Phases) -> torch.Tensor | None:
    """Goes on to the next point where messages are under way; the result where there is none."""
    try:
        next(phases)
    except StopIteration as done:
        result: torch.Tensor = done.value
        return result
    return None


def _chunks(job: OverlapJob) -> Iterator[Box]:
    """The interior in as many chunks as there are phases to wait for; nothing where it is empty."""
    interior = job.interior
    if not interior.area:
        return
    if job.rows is None or job.cols is None:
        yield interior
        return
    middle = interior.row.start + interior.row.size // 2
    for row in (Interval(interior.row.start, middle), Interval(middle, interior.row.stop)):
        if row.size:
            yield Box(row, interior.col)


def _convolve(
    x_BCHW: torch.Tensor, read: Box, at: Box, weight: torch.Tensor, bias: torch.Tensor | None, o: ConvolutionOptions
) -> torch.Tensor:
    """The outputs that read `read` of a tensor that covers `at`."""
    rows, cols = read.relative_to(at).slices
    part_BCHW = x_BCHW[:, :, rows, cols]
    return o.convolve(part_BCHW, weight, bias, o.stride, o.padding, o.dilation, o.groups)


def _output(like_BCHW: torch.Tensor, given: Box) -> torch.Tensor:
    layout = torch.channels_last if like_BCHW.is_contiguous(memory_format=torch.channels_last) else None
    return torch.empty(
        (*like_BCHW.shape[:2], *given.shape),
        dtype=like_BCHW.dtype,
        device=like_BCHW.device,
        memory_format=layout or torch.contiguous_format,
    )
