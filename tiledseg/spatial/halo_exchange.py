"""The halo exchange as an operation of autograd: from each rank's own block to the window that it needs, and back.

All that a window lacks comes straight from its owners, corners from the rank across them: one batch of messages for
both dims. The backward pass is the adjoint: each piece of a window's gradient goes back to the rank that owns the piece
and is added there, in the order of ranks, so sums are the same run after run.

A piece that is not one run of memory travels by a contiguous strip, which is allocated once. Two copies are saved. An
activation is applied while its window is made, and its gradient while the window's is taken apart (`activated`). To the
gradient of a window that nobody else has, the arriving pieces are added in place, and the block's gradient is a view of
it (`owned`).

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (it is the order of the layers,
and autograd's order is its reverse on every rank); within one exchange every receive and send is posted before anything
is waited for; the peers and sizes of all messages follow from integers that all ranks share.

Where a window is to be made once more (`models.rerun.rebuild`), the pieces that have arrived are kept, and put beside
the rank's own block again: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.collectives import as_bytes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.geometry.sharing.block_exchange import BlockExchange, ExchangePiece
from tiledseg.models.rerun.notes import Notes, current
from tiledseg.spatial.written import Written

Take = Callable[[ExchangePiece, torch.Tensor], object]
"""Puts a piece of the tensor at hand, or what is made of it, into a tensor of its size."""


class Flight(NamedTuple):
    """An exchange whose messages are under way into pieces of what is `made`: each into itself, or into a strip.
    `notes`: where what arrives is kept; `form`: what is applied to it."""

    work: Work
    made_BCHW: torch.Tensor
    arriving: Sequence[tuple[ExchangePiece, torch.Tensor | None]] = ()
    notes: Notes | None = None
    form: Written | None = None

    def window(self) -> torch.Tensor:
        """Wait for the messages and return the window."""
        self.work.wait()
        for piece, strip_BCHW in self.arriving:
            at_BCHW = part(self.made_BCHW, piece)
            if self.form is not None:
                self.form.apply(at_BCHW if strip_BCHW is None else strip_BCHW, out=at_BCHW)
            elif strip_BCHW is not None:
                at_BCHW.copy_(strip_BCHW)
        if self.notes is not None:
            self.notes.add([part(self.made_BCHW, piece).clone() for piece, _ in self.arriving])
        return self.made_BCHW

    def gradient(self) -> torch.Tensor:
        """Wait for the messages and return the gradient of this rank's block, with all that belongs to it."""
        self.work.wait()
        for piece, strip_BCHW in self.arriving:
            assert strip_BCHW is not None, "what is added to others has a strip"
            part(self.made_BCHW, piece).add_(strip_BCHW)
        return self.made_BCHW


@dataclass
class HaloExchanger:
    """The halos of one place in a network. Its strips are allocated once and used again at every step."""

    axes: Axes
    _strips: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def strips(self) -> list[torch.Tensor]:
        """The strips that are kept between steps."""
        return list(self._strips.values())

    def exchange(
        self, x_BCHW: torch.Tensor, exchange: BlockExchange | None, fill: float = 0.0, owned: bool = False
    ) -> torch.Tensor:
        """Return the window of this rank from the blocks of all. Collective over the ranks of the image.

        `x_BCHW` is this rank's own block along each dim that has an exchange. Beyond the tensor's ends the window holds
        `fill`. Where nothing is to be done (None) x itself is returned. Differentiable: the adjoint adds each part of
        the gradient to its owner, and drops what was filled in. `owned`: the layer that reads the window makes its
        gradient, and nobody else has that.
        """
        if exchange is None:
            return x_BCHW
        result: torch.Tensor = _Exchange.apply(x_BCHW, self, exchange, fill, owned)
        return result

    def activated(self, x_BCHW: torch.Tensor, exchange: BlockExchange, form: Written) -> torch.Tensor:
        """Return the window after an activation that is zero at zero, in one pass; x stays as it is. Collective as
        `exchange`. Autograd keeps the result, as of an activation that writes over its input."""
        result: torch.Tensor = _Activated.apply(x_BCHW, self, exchange, form)
        return result

    def start(self, x_BCHW: torch.Tensor, exchange: BlockExchange, fill: float, form: Written | None = None) -> Flight:
        """Post the messages, and make what needs none of them; leave x alone until its `window` is there. Without
        autograd. What has been noted is taken as it was, and nothing is posted."""

        def copy(piece: ExchangePiece, into_BCHW: torch.Tensor) -> None:
            into_BCHW.copy_(part(x_BCHW, piece))

        window_BCHW, notes = _empty(x_BCHW, exchange.window), current()
        again = notes is not None and notes.is_read
        flight = Flight(DoneWork(), window_BCHW)
        if not again:
            flight = self._post("forth", x_BCHW, window_BCHW, exchange.sends, exchange.receives, copy)
        for piece in exchange.outside:
            part(window_BCHW, piece).fill_(fill)
        if exchange.kept is not None:
            own_BCHW, into_BCHW = part(x_BCHW, exchange.kept[0]), part(window_BCHW, exchange.kept[1])
            into_BCHW.copy_(own_BCHW) if form is None else form.apply(own_BCHW, out=into_BCHW)
        if notes is not None and again:
            for piece, arrived_BCHW in zip(exchange.receives, notes.next(), strict=True):
                part(window_BCHW, piece).copy_(arrived_BCHW)
            return flight
        return flight._replace(notes=notes, form=form)

    def start_back(
        self,
        gradient_BCHW: torch.Tensor,
        exchange: BlockExchange,
        owned: bool = False,
        form: Written | None = None,
        y_BCHW: torch.Tensor | None = None,
    ) -> Flight:
        """Start the adjoint: from the gradient of this rank's window to the `gradient` of its own block. `owned`: the
        latter is a part of the former where that holds all of the block. `form`: that of `activated`, which gave y."""

        def take(piece: ExchangePiece, into_BCHW: torch.Tensor) -> None:
            if form is None or y_BCHW is None:
                into_BCHW.copy_(part(gradient_BCHW, piece))
            else:
                form.gradient(part(gradient_BCHW, piece), part(y_BCHW, piece), grad_input=into_BCHW)

        pieces = exchange.receives, exchange.sends
        if owned and exchange.kept is not None and exchange.keeps_all:
            own_BCHW = part(gradient_BCHW, exchange.kept[1])
            return self._post("back", gradient_BCHW, own_BCHW, *pieces, take)
        made_BCHW = _empty(gradient_BCHW, exchange.owned)
        flight = self._post("back", gradient_BCHW, made_BCHW, *pieces, take, apart=form is not None)
        if not exchange.keeps_all:
            made_BCHW.zero_()
        if exchange.kept is not None:
            take(exchange.kept[1], part(made_BCHW, exchange.kept[0]))
        return flight

    def _post(
        self,
        way: str,
        x_BCHW: torch.Tensor,
        made_BCHW: torch.Tensor,
        sends: Sequence[ExchangePiece],
        receives: Sequence[ExchangePiece],
        take: Take,
        apart: bool = False,
    ) -> Flight:
        """Post the pieces `sends` of x, and `receives` of what is made: `back` they are added to values that are there.
        `apart`: what is sent is made of x, not a part of it."""
        outgoing, incoming, arriving = [], [], []
        for number, piece in enumerate(sends):
            part_BCHW = part(x_BCHW, piece)
            if apart or not _is_run(part_BCHW):
                strip_BCHW = self._strip((way, "sent", number), part_BCHW)
                take(piece, strip_BCHW)
                part_BCHW = strip_BCHW
            outgoing.append(Message(self.axes.rank_at(*piece.peer), as_bytes(part_BCHW.permute(0, 2, 3, 1))))
        for number, piece in enumerate(receives):
            part_BCHW, strip = part(made_BCHW, piece), None
            if way == "back" or not _is_run(part_BCHW):
                strip = part_BCHW = self._strip((way, "received", number), part_BCHW)
            incoming.append(Message(self.axes.rank_at(*piece.peer), as_bytes(part_BCHW.permute(0, 2, 3, 1))))
            arriving.append((piece, strip))
        return Flight(self.axes.point_to_point.start(outgoing, incoming), made_BCHW, arriving)

    def _strip(self, place: tuple[str, str, int], like_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the strip of a piece, channels last in memory."""
        key = *place, like_BCHW.shape, like_BCHW.dtype, like_BCHW.device
        if key not in self._strips:
            batch, channels, height, width = like_BCHW.shape
            strip_BHWC = torch.empty((batch, height, width, channels), dtype=like_BCHW.dtype, device=like_BCHW.device)
            self._strips[key] = strip_BHWC.permute(0, 3, 1, 2)
        return self._strips[key]


def part(x_BCHW: torch.Tensor, piece: ExchangePiece) -> torch.Tensor:
    return x_BCHW[:, :, piece.rows, piece.cols]


def _is_run(part_BCHW: torch.Tensor) -> bool:
    """Return True for a part that is one run of memory, channels last."""
    return part_BCHW.permute(0, 2, 3, 1).is_contiguous()


def _empty(like_BCHW: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor:
    """Return a tensor of other sides (None: the same) without values; channels last where both layouts would do."""
    plain = like_BCHW.is_contiguous() and not like_BCHW.is_contiguous(memory_format=torch.channels_last)
    height, width = (here if side is None else side for side, here in zip(sides, like_BCHW.shape[2:], strict=True))
    layout = torch.contiguous_format if plain else torch.channels_last
    return torch.empty(
        (*like_BCHW.shape[:2], height, width), dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=layout
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchanger: HaloExchanger, exchange: BlockExchange, fill: float, owned: bool
    ) -> torch.Tensor:
        ctx.exchanger, ctx.exchange, ctx.owned = exchanger, exchange, owned
        return exchanger.start(x_BCHW, exchange, fill).window()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flight = ctx.exchanger.start_back(gradient_BCHW, ctx.exchange, ctx.owned)
        return flight.gradient(), None, None, None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchanger: HaloExchanger, exchange: BlockExchange, form: Written
    ) -> torch.Tensor:
        ctx.exchanger, ctx.exchange, ctx.form = exchanger, exchange, form
        y_BCHW = exchanger.start(x_BCHW, exchange, 0.0, form).window()
        ctx.save_for_backward(y_BCHW)
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y_BCHW,) = ctx.saved_tensors
        flight = ctx.exchanger.start_back(gradient_BCHW, ctx.exchange, form=ctx.form, y_BCHW=y_BCHW)
        return flight.gradient(), None, None, None
