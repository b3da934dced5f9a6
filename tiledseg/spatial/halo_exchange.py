"""The halo exchange as an operation of autograd: from each rank's own block to the window that it needs, and back.

All that a window lacks comes straight from its owners, corners from the rank across them: one batch of messages for
both dims. Each piece travels as a contiguous strip. The backward pass is the adjoint. Each piece of a window's gradient
goes back to the rank that owns the piece and is added there, in the order of ranks, so sums are the same run after run.

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (it is the order of the layers,
and autograd's order is its reverse on every rank). Within one exchange every receive and send is posted in one batch
before anything is waited for, with NCCL too. Peers and sizes of all messages follow from integers that all ranks share.

Where a window is to be made once more (`models.rebuild`), the pieces that have arrived are kept, and put beside
the rank's own block again: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.point_to_point import Message, Work, as_bytes
from tiledseg.geometry.sharing.decomposition import BlockExchange, ExchangePiece
from tiledseg.models.notes import Notes, current


class Flight(NamedTuple):
    """An exchange whose messages are under way into strips, for pieces of what is `made`. `notes`: a record of what
    arrives."""

    work: Work
    made_BCHW: torch.Tensor
    arriving: Sequence[tuple[ExchangePiece, torch.Tensor]] = ()
    notes: Notes | None = None

    def window(self) -> torch.Tensor:
        """Wait for the messages and return the window."""
        self.work.wait()
        for piece, strip_BCHW in self.arriving:
            part(self.made_BCHW, piece).copy_(strip_BCHW)
        if self.notes is not None:
            self.notes.add([strip_BCHW.clone() for _, strip_BCHW in self.arriving])
        return self.made_BCHW

    def gradient(self) -> torch.Tensor:
        """Wait for the messages and return the gradient of this rank's block, with all that belongs to it."""
        self.work.wait()
        for piece, strip_BCHW in self.arriving:
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
        gradient, and nobody else has that, so the block's gradient may be a view of it.
        """
        if exchange is None:
            return x_BCHW
        result: torch.Tensor = _Exchange.apply(x_BCHW, self, exchange, fill, owned)
        return result

    def start(self, x_BCHW: torch.Tensor, exchange: BlockExchange, fill: float) -> Flight:
        """Post the messages, and make what needs none of them; leave x alone until its `window` is there. Without
        autograd. Pieces that have been noted are taken from the notes, and nothing is posted."""
        window_BCHW, notes = _empty(x_BCHW, exchange.window), current()
        if notes is not None and notes.is_read:
            arrived = list(zip(exchange.receives, notes.next(), strict=True))
            flight = Flight(Work(), window_BCHW, arrived)
        else:
            flight = self._post("forth", x_BCHW, window_BCHW, exchange.sends, exchange.receives)._replace(notes=notes)
        for piece in exchange.outside:
            part(window_BCHW, piece).fill_(fill)
        if exchange.kept is not None:
            part(window_BCHW, exchange.kept[1]).copy_(part(x_BCHW, exchange.kept[0]))
        return flight

    def start_back(self, gradient_BCHW: torch.Tensor, exchange: BlockExchange, owned: bool = False) -> Flight:
        """Start the adjoint: from the gradient of this rank's window to the `gradient` of its own block. `owned`: the
        latter is a part of the former where that holds all of the block."""
        pieces = exchange.receives, exchange.sends
        if owned and exchange.kept is not None and exchange.keeps_all:
            return self._post("back", gradient_BCHW, part(gradient_BCHW, exchange.kept[1]), *pieces)
        made_BCHW = _empty(gradient_BCHW, exchange.owned)
        flight = self._post("back", gradient_BCHW, made_BCHW, *pieces)
        if not exchange.keeps_all:
            made_BCHW.zero_()
        if exchange.kept is not None:
            part(made_BCHW, exchange.kept[0]).copy_(part(gradient_BCHW, exchange.kept[1]))
        return flight

    def _post(
        self,
        way: str,
        x_BCHW: torch.Tensor,
        made_BCHW: torch.Tensor,
        sends: Sequence[ExchangePiece],
        receives: Sequence[ExchangePiece],
    ) -> Flight:
        """Post strips of the pieces `sends` of x, and strips for the pieces `receives` of what is made."""
        outgoing, incoming, arriving = [], [], []
        for number, piece in enumerate(sends):
            strip_BCHW = self._strip((way, "sent", number), part(x_BCHW, piece)).copy_(part(x_BCHW, piece))
            outgoing.append(self._message(piece, strip_BCHW))
        for number, piece in enumerate(receives):
            arriving.append((piece, self._strip((way, "received", number), part(made_BCHW, piece))))
            incoming.append(self._message(*arriving[-1]))
        return Flight(self.axes.point_to_point.start(outgoing, incoming), made_BCHW, arriving)

    def _message(self, piece: ExchangePiece, strip_BCHW: torch.Tensor) -> Message:
        return Message(self.axes.rank_at(*piece.peer), as_bytes(strip_BCHW.permute(0, 2, 3, 1)))

    def _strip(self, place: tuple[str, str, int], like_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the strip of a piece, channels last in memory."""
        key = *place, like_BCHW.shape, like_BCHW.dtype, like_BCHW.device
        if key not in self._strips:
            batch, channels, height, width = like_BCHW.shape
            strip_BHWC = torch.empty((batch, height, width, channels), dtype=like_BCHW.dtype, device=like_BCHW.device)
            self._strips[key] = strip_BHWC.permute(0, 3, 1, 2)
        return self._strips[key]


def part(x_BCHW: torch.Tensor, piece: ExchangePiece) -> torch.Tensor:
    """Return the view of a piece."""
    return x_BCHW[:, :, piece.rows, piece.cols]


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
