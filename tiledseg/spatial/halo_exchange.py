"""The halo exchange as an operation of autograd: forms a rank's window from its own block and its neighbours'.

Every missing part of a window comes directly from its owner, corners included: one batch of messages for both dims,
each a contiguous strip. The backward pass is the adjoint. Each part of a window's gradient returns to its owner and is
added there, in the order of ranks, so sums are reproducible.

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (that of the layers, backward its
reverse). Each exchange posts all its receives and sends in one batch before anything waits, with NCCL too. Peers and
sizes of all messages follow from integers that all ranks share.

If a window will be recomputed (`models.rebuild`), the received strips are kept and reused: nothing is sent again.

A convolution can compute its interior (the outputs that read only this rank's own block) while the halos travel, and
its borders once they have arrived. In the backward pass the input's gradient is computed first, and the weights'
gradient while the halos of the former travel. The overlap costs five smaller convolutions instead of one, and a copy of
the output. The gain depends on the machine (`benchmarks/spatial`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from tiledseg.comm.collectives import Message, Work, as_bytes
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.sharing.decomposition import BlockExchange, GridPosition, Patch
from tiledseg.memory.second_run import CURRENT, Notes
from tiledseg.models.layers.block import BlockPlace

Pair = tuple[int, int]
Patches = Mapping[GridPosition, Patch]


class Flight(NamedTuple):
    """An exchange in flight: strips arrive for patches of `made_BCHW`. `sent`: outgoing messages, kept alive until the
    end. `notes`: the record of received strips."""

    work: Work
    made_BCHW: torch.Tensor
    arriving: Sequence[tuple[Patch, torch.Tensor]]
    sent: Sequence[Message] = ()
    notes: Notes | None = None

    def window(self) -> torch.Tensor:
        """Wait for the messages and return the window."""
        self.work.wait()
        for patch, strip_BCHW in self.arriving:
            part(self.made_BCHW, patch).copy_(strip_BCHW)
        if self.notes is not None:
            self.notes.results.append([strip_BCHW for _, strip_BCHW in self.arriving])
        return self.made_BCHW

    def gradient(self) -> torch.Tensor:
        """Wait for the messages and return the complete gradient of this rank's block."""
        self.work.wait()
        for patch, strip_BCHW in self.arriving:
            part(self.made_BCHW, patch).add_(strip_BCHW)
        return self.made_BCHW


def exchanged(
    x_BCHW: torch.Tensor, exchange: BlockExchange | None, axes: Axes, fill: float = 0.0, owned: bool = False
) -> torch.Tensor:
    """Return the window of this rank from the blocks of all. Collective over the ranks of the image.

    `x_BCHW`: this rank's own block along each dim that has an exchange. Beyond the tensor's ends the window holds
    `fill`. Without an exchange (None), return x itself. Differentiable: the adjoint adds each part of the gradient to
    its owner's, and drops the gradient of filled values. `owned`: no other code holds the window's gradient, so the
    block's gradient may be a view of it.
    """
    if exchange is None:
        return x_BCHW
    return _Exchange.apply(x_BCHW, exchange, axes, fill, owned)


def start(x_BCHW: torch.Tensor, exchange: BlockExchange, axes: Axes, fill: float) -> Flight:
    """Post the messages and fill the rest of the window, without autograd. The caller must not write to x before
    `window` returns. In a second run strips come from the notes, and nothing is posted."""
    window_BCHW, notes = _empty(x_BCHW, exchange.window), CURRENT.get()
    if notes is not None and notes.unread is not None:
        flight = Flight(Work(), window_BCHW, list(zip(exchange.receives.values(), next(notes.unread), strict=True)))
    else:
        flight = _post(axes, x_BCHW, window_BCHW, exchange.sends, exchange.receives)._replace(notes=notes)
    for patch in exchange.outside:
        part(window_BCHW, patch).fill_(fill)
    if exchange.kept is not None:
        part(window_BCHW, exchange.kept[1]).copy_(part(x_BCHW, exchange.kept[0]))
    return flight


def start_back(gradient_BCHW: torch.Tensor, exchange: BlockExchange, axes: Axes, owned: bool = False) -> Flight:
    """Start the adjoint: from the gradient of this rank's window to the `gradient` of its own block. `owned`: the
    latter may be a view of the former, if the window holds all of the block."""
    if owned and exchange.kept is not None and exchange.keeps_all:
        made_BCHW = part(gradient_BCHW, exchange.kept[1])
        return _post(axes, gradient_BCHW, made_BCHW, exchange.receives, exchange.sends)
    made_BCHW = _empty(gradient_BCHW, exchange.owned)
    flight = _post(axes, gradient_BCHW, made_BCHW, exchange.receives, exchange.sends)
    if not exchange.keeps_all:
        made_BCHW.zero_()
    if exchange.kept is not None:
        part(made_BCHW, exchange.kept[0]).copy_(part(gradient_BCHW, exchange.kept[1]))
    return flight


def _post(axes: Axes, x_BCHW: torch.Tensor, made_BCHW: torch.Tensor, sends: Patches, receives: Patches) -> Flight:
    """Post messages for the patches `sends` of x and the patches `receives` of `made_BCHW`, as channels-last strips."""

    def message(peer: GridPosition, strip_BHWC: torch.Tensor) -> Message:
        return Message(axes.rank_at(*peer), as_bytes(strip_BHWC))

    sent = [message(peer, part(x_BCHW, patch).permute(0, 2, 3, 1).contiguous()) for peer, patch in sends.items()]
    strips_BHWC = [
        torch.empty_like(part(made_BCHW, patch).permute(0, 2, 3, 1), memory_format=torch.contiguous_format)
        for patch in receives.values()
    ]
    incoming = [message(*each) for each in zip(receives, strips_BHWC, strict=True)]
    arriving = [(patch, strip.permute(0, 3, 1, 2)) for patch, strip in zip(receives.values(), strips_BHWC, strict=True)]
    return Flight(axes.point_to_point.start(sent, incoming), made_BCHW, arriving, sent)


def part(x_BCHW: torch.Tensor, patch: Patch) -> torch.Tensor:
    return x_BCHW[:, :, patch[0], patch[1]]


def _empty(like_BCHW: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor:
    """Return an uninitialised tensor of other sides (None: the same), channels last unless only the plain layout
    fits."""
    plain = like_BCHW.is_contiguous() and not like_BCHW.is_contiguous(memory_format=torch.channels_last)
    height, width = (here if side is None else side for side, here in zip(sides, like_BCHW.shape[2:], strict=True))
    layout = torch.contiguous_format if plain else torch.channels_last
    return torch.empty(
        (*like_BCHW.shape[:2], height, width), dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=layout
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchange: BlockExchange, axes: Axes, fill: float, owned: bool
    ) -> torch.Tensor:
        ctx.back = exchange, axes, owned
        return start(x_BCHW, exchange, axes, fill).window()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return start_back(gradient_BCHW, *ctx.back).gradient(), None, None, None, None


@lru_cache(maxsize=1024)
def _within(layer: Convolution, out: Interval, own: Interval) -> Interval:
    """Return the outputs of `out` that read only inputs of `own`."""
    inside = [o for o in range(out.start, out.stop) if own.contains(layer.required_input(Interval(o, o + 1)))]
    return Interval(inside[0], inside[-1] + 1) if inside else Interval(out.start, out.start)


def _around(interior: Box, given: Box) -> list[Box]:
    """Return the outputs around the interior as up to four strips; all outputs if there is no interior."""
    if not interior.area:
        return [given]
    strips = (
        Box(Interval(given.row.start, interior.row.start), given.col),
        Box(Interval(interior.row.stop, given.row.stop), given.col),
        Box(interior.row, Interval(given.col.start, interior.col.start)),
        Box(interior.row, Interval(interior.col.stop, given.col.stop)),
    )
    return [strip for strip in strips if strip.area]


class OverlappedConvolution(torch.autograd.Function):
    """A convolution of a rank's own block, with the halo exchange inside. Collective over the ranks of the image.

    `layers`: along rows and columns. `convolve` takes the `options` (stride, padding, dilation, groups) as
    `functional.conv2d` does; padding only along dims that are not cut.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axes: Axes,
        exchange: BlockExchange,
        layers: tuple[Convolution, Convolution],
        place: BlockPlace,
        convolve: Callable[..., torch.Tensor],
        options: tuple[Pair, Pair, Pair, int],
    ) -> torch.Tensor:
        flight, given = start(x_BCHW, exchange, axes, 0.0), Box(place.row.given, place.col.given)
        dims = list(zip(exchange.window, layers, (place.row, place.col), strict=True))
        own = Box(*(at.read if size is None else at.owned for size, _, at in dims))  # inputs before the exchange
        interior = Box(*(at.given if size is None else _within(layer, at.given, at.owned) for size, layer, at in dims))
        y_BCHW: torch.Tensor | None = None

        def compute(out: Box, source_BCHW: torch.Tensor, at: Box) -> torch.Tensor:
            """Compute the outputs `out` from inputs that cover `at`, write them into y, and return y."""
            sides = zip(dims, (out.row, out.col), strict=True)
            read = Box(*(dim.read if dim.whole else layer.required_input(side) for (_, layer, dim), side in sides))
            part_BCHW = convolve(part(source_BCHW, read.relative_to(at).slices), weight, bias, *options)
            made_BCHW = _empty(part_BCHW, given.shape) if y_BCHW is None else y_BCHW
            part(made_BCHW, out.relative_to(given).slices).copy_(part_BCHW)
            return made_BCHW

        if interior.area:
            y_BCHW = compute(interior, x_BCHW, own)
        window_BCHW, read = flight.window(), Box(place.row.read, place.col.read)
        for out in _around(interior, given):
            y_BCHW = compute(out, window_BCHW, read)
        assert y_BCHW is not None, "a rank gives at least one output"
        ctx.save_for_backward(window_BCHW, weight)
        ctx.back = axes, exchange, options
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        window_BCHW, weight = ctx.saved_tensors
        axes, exchange, options = ctx.back
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dweight = flight = None
        if wants_input:
            window_gradient_BCHW = conv2d_input(window_BCHW.shape, weight, g_BCHW, *options)
            flight = start_back(window_gradient_BCHW, exchange, axes, owned=True)
        if wants_weight:
            dweight = conv2d_weight(window_BCHW, weight.shape, g_BCHW, *options)
        dbias = g_BCHW.sum((0, 2, 3)) if wants_bias else None
        return None if flight is None else flight.gradient(), dweight, dbias, *[None] * 6
