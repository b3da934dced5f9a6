"""The halo exchange as an operation of autograd: from each rank's own block to the window that it needs, and back.

Rows travel first, then columns of what the rows have made: so corners come along, with messages between ranks of one
row or one column of the mesh only. The backward pass is the adjoint, in reverse: each piece of a window's gradient goes
back to the rank that owns the piece and is added there, in the order of ranks, so sums are the same run after run.

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (it is the order of the layers,
and autograd's order is its reverse on every rank); within one exchange and axis every receive and send is posted before
anything is waited for; who sends what to whom follows from integers that all ranks share.

Where a window is to be made once more (`models.rebuild`), what has arrived is kept, and put beside the rank's own block
again: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.point_to_point import Message
from tiledseg.comm.work import Work
from tiledseg.geometry.decomposition import WindowExchange
from tiledseg.geometry.interval import Interval
from tiledseg.models.notes import current

ROWS, COLS = 2, 3  # dims of x_BCHW

# An exchange under way: it stops wherever messages have been posted and work could be done meanwhile; its value is the
# result. Take it to the end with `complete`, on every rank.
Phases = Generator[None, None, torch.Tensor]


def complete(phases: Phases) -> torch.Tensor:
    """Waits for all that is left of an exchange; its result."""
    while True:
        try:
            next(phases)
        except StopIteration as done:
            result: torch.Tensor = done.value
            return result


@dataclass
class HaloExchanger:
    """Carries the halos of one place in a network. Its strips are allocated once and used again at every step."""

    axes: Axes
    _strips: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def exchange(
        self, x_BCHW: torch.Tensor, rows: WindowExchange | None, cols: WindowExchange | None, fill: float = 0.0
    ) -> torch.Tensor:
        """The window of this rank from the blocks of all. Collective over the ranks of the image.

        `x_BCHW` is this rank's own block along each dim that has an exchange; a dim without one (None) stays as it is.
        Beyond the tensor's ends the window holds `fill`. Where nothing is to be done x itself is returned.
        Differentiable: the adjoint adds each part of the gradient to its owner, and drops what was filled in.
        """
        if all(exchange is None or exchange.is_identity for exchange in (rows, cols)):
            return x_BCHW
        result: torch.Tensor = _Exchange.apply(x_BCHW, self, rows, cols, fill)
        return result

    def gathering(
        self, x_BCHW: torch.Tensor, rows: WindowExchange | None, cols: WindowExchange | None, fill: float
    ) -> Phases:
        """The exchange itself, without autograd."""
        if cols is None:
            return (yield from self._gather_dim(x_BCHW, ROWS, rows, fill)) if rows is not None else x_BCHW
        if rows is None:
            return (yield from self._gather_dim(x_BCHW, COLS, cols, fill))
        if cols.kept != cols.owned:  # columns are dropped: they must travel along the rows first all the same
            middle_BCHW = yield from self._gather_dim(x_BCHW, ROWS, rows, fill)
            return (yield from self._gather_dim(middle_BCHW, COLS, cols, fill))
        # The rows' result is built where the columns' needs it, so the block is copied once only.
        window_BCHW = _empty(x_BCHW, rows.window.size, cols.window.size)
        middle_BCHW = _part(window_BCHW, COLS, cols.kept, cols.window.start)
        yield from self._gather_dim(x_BCHW, ROWS, rows, fill, into=middle_BCHW)
        return (yield from self._gather_dim(middle_BCHW, COLS, cols, fill, into=window_BCHW))

    def scattering(
        self, gradient_BCHW: torch.Tensor, rows: WindowExchange | None, cols: WindowExchange | None
    ) -> Phases:
        """The adjoint of `gathering`: from the gradient of this rank's window to that of its own block."""
        for dim, exchange in ((COLS, cols), (ROWS, rows)):
            if exchange is not None:
                gradient_BCHW = yield from self._scatter_dim(gradient_BCHW, dim, exchange)
        return gradient_BCHW

    def _gather_dim(
        self,
        x_BCHW: torch.Tensor,
        dim: int,
        exchange: WindowExchange,
        fill: float,
        into: torch.Tensor | None = None,
    ) -> Phases:
        window = exchange.window
        if into is None:
            shape = (window.size, x_BCHW.shape[COLS]) if dim == ROWS else (x_BCHW.shape[ROWS], window.size)
            into = _empty(x_BCHW, *shape)
        notes = current()
        if notes is not None and notes.is_read:
            self._place(x_BCHW, dim, exchange, fill, into)
            for target, strip in zip(_targets(into, dim, exchange), notes.next(), strict=True):
                target.copy_(strip)
            return into
        arriving = [
            _Arriving(self, ("in", dim, t.peer), t.peer, target)
            for t, target in zip(exchange.receives, _targets(into, dim, exchange), strict=True)
        ]
        sends = [(t.peer, _part(x_BCHW, dim, t.part, exchange.owned.start)) for t in exchange.sends]
        work = self._start(dim, sends, arriving, "out")
        self._place(x_BCHW, dim, exchange, fill, into)
        yield
        work.wait()
        for arrival in arriving:
            arrival.put()
        if notes is not None:
            notes.add([target.detach().clone() for target in _targets(into, dim, exchange)])
        return into

    def _place(self, x_BCHW: torch.Tensor, dim: int, exchange: WindowExchange, fill: float, into: torch.Tensor) -> None:
        """What the rank has itself of a window, and what lies beyond the tensor's ends."""
        window = exchange.window
        if exchange.kept.size:  # an empty one may lie outside the window
            kept_BCHW = _part(into, dim, exchange.kept, window.start)
            source_BCHW = _part(x_BCHW, dim, exchange.kept, exchange.owned.start)
            if kept_BCHW.data_ptr() != source_BCHW.data_ptr():
                kept_BCHW.copy_(source_BCHW)
        before, after = exchange.outside
        if before:
            into.narrow(dim, 0, before).fill_(fill)
        if after:
            into.narrow(dim, window.size - after, after).fill_(fill)

    def _scatter_dim(self, gradient_BCHW: torch.Tensor, dim: int, exchange: WindowExchange) -> Phases:
        window, owned = exchange.window, exchange.owned
        shape = (owned.size, gradient_BCHW.shape[COLS]) if dim == ROWS else (gradient_BCHW.shape[ROWS], owned.size)
        result_BCHW = _empty(gradient_BCHW, *shape)
        arriving = [
            _Arriving(self, ("adjoint in", dim, t.peer), t.peer, _part(result_BCHW, dim, t.part, owned.start), True)
            for t in exchange.sends
        ]
        sends = [(t.peer, _part(gradient_BCHW, dim, t.part, window.start)) for t in exchange.receives]
        work = self._start(dim, sends, arriving, "adjoint out")
        if exchange.kept != owned:
            result_BCHW.zero_()
        if exchange.kept.size:
            kept_BCHW = _part(gradient_BCHW, dim, exchange.kept, window.start)
            _part(result_BCHW, dim, exchange.kept, owned.start).copy_(kept_BCHW)
        yield
        work.wait()
        for arrival in arriving:
            arrival.put()
        return result_BCHW

    def _start(self, dim: int, sends: list[tuple[int, torch.Tensor]], arriving: list[_Arriving], what: str) -> Work:
        outgoing = [Message(self._rank(dim, peer), self._packed((what, dim, peer), x)) for peer, x in sends]
        incoming = [Message(self._rank(dim, a.peer), a.strip_BHWC) for a in arriving]
        return self.axes.point_to_point.start(outgoing, incoming)

    def _rank(self, dim: int, peer: int) -> int:
        """The rank of the job with index `peer` along this rank's column (dim rows) or row (dim cols) of the mesh."""
        position = self.axes.position
        assert position is not None, "ranks outside the mesh own no block and exchange nothing"
        return self.axes.rank_at(peer, position.col) if dim == ROWS else self.axes.rank_at(position.row, peer)

    def _packed(self, key: tuple[Any, ...], x_BCHW: torch.Tensor) -> torch.Tensor:
        """A block as it travels: channels last, in one piece; without a copy where it lies so in memory already."""
        x_BHWC = x_BCHW.detach().permute(0, 2, 3, 1)
        if x_BHWC.is_contiguous():
            return x_BHWC
        strip_BHWC = self.strip(key, x_BHWC)
        strip_BHWC.copy_(x_BHWC)
        return strip_BHWC

    def strip(self, key: tuple[Any, ...], like_BHWC: torch.Tensor) -> torch.Tensor:
        """The contiguous buffer of this key, for a tensor of this shape, dtype and device."""
        full = (*key, like_BHWC.shape, like_BHWC.dtype, like_BHWC.device)
        if full not in self._strips:
            self._strips[full] = torch.empty(like_BHWC.shape, dtype=like_BHWC.dtype, device=like_BHWC.device)
        return self._strips[full]


class _Arriving:
    """A part that is on its way into `target_BCHW`: straight into it where it lies in one piece, else into a strip."""

    def __init__(
        self, owner: HaloExchanger, key: tuple[Any, ...], peer: int, target_BCHW: torch.Tensor, adds: bool = False
    ) -> None:
        self.peer = peer
        self._target_BHWC = target_BCHW.detach().permute(0, 2, 3, 1)
        self._adds = adds
        self._direct = not adds and self._target_BHWC.is_contiguous()
        self.strip_BHWC = self._target_BHWC if self._direct else owner.strip(key, self._target_BHWC)

    def put(self) -> None:
        """Moves what has arrived to its place."""
        if self._adds:
            self._target_BHWC.add_(self.strip_BHWC)
        elif not self._direct:
            self._target_BHWC.copy_(self.strip_BHWC)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: torch.Tensor,
        exchanger: HaloExchanger,
        rows: WindowExchange | None,
        cols: WindowExchange | None,
        fill: float,
    ) -> torch.Tensor:
        ctx.exchanger, ctx.rows, ctx.cols = exchanger, rows, cols
        return complete(exchanger.gathering(x_BCHW, rows, cols, fill))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return complete(ctx.exchanger.scattering(gradient_BCHW, ctx.rows, ctx.cols)), None, None, None, None


def _targets(into: torch.Tensor, dim: int, exchange: WindowExchange) -> list[torch.Tensor]:
    """The parts of a window that others send."""
    return [_part(into, dim, t.part, exchange.window.start) for t in exchange.receives]


def _part(x_BCHW: torch.Tensor, dim: int, part: Interval, origin: int) -> torch.Tensor:
    """The positions `part` of a block whose first position is `origin`."""
    return x_BCHW.narrow(dim, part.start - origin, part.size)


def _empty(like_BCHW: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Of other sides, in the same memory format; channels last where both would do."""
    shape = (*like_BCHW.shape[:2], height, width)
    plain = like_BCHW.is_contiguous() and not like_BCHW.is_contiguous(memory_format=torch.channels_last)
    layout = torch.contiguous_format if plain else torch.channels_last
    return torch.empty(shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=layout)
