"""The halo exchange as an operation of autograd: from each rank's own block to the window that it needs, and back.

All that a window lacks comes straight from its owners, corners from the rank across them: one batch of messages for
both dims. The backward pass is the adjoint: each piece of a window's gradient goes back to the rank that owns the piece
and is added there, in the order of ranks, so sums are the same run after run.

What is sent and where it goes is worked out once for each layout of a block, and written down as views of it (`Part`):
an exchange then makes a tensor, copies and posts.

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (it is the order of the layers,
and autograd's order is its reverse on every rank); within one exchange every receive and send is posted before anything
is waited for; who sends what to whom follows from integers that all ranks share.

Where a window is to be made once more (`models.rerun.rebuild`), what has arrived is kept, and put beside the rank's own
block again: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.collectives import as_bytes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.geometry.sharing.block_exchange import BlockExchange, Piece
from tiledseg.models.rerun.notes import Notes, current


class Part:
    """A part of every tensor of one layout, and the strip by which it travels where it does not lie in one piece, or
    `adds` to what is there. Bytes travel channels last."""

    def __init__(self, like_BCHW: torch.Tensor, piece: Piece, adds: bool = False) -> None:
        part_BCHW = like_BCHW[:, :, piece.rows, piece.cols]
        self._view = part_BCHW.shape, part_BCHW.stride()
        self._offset = part_BCHW.storage_offset() - like_BCHW.storage_offset()
        self._length = part_BCHW.numel()
        part_BHWC = part_BCHW.permute(0, 2, 3, 1)
        self.strip_BCHW: torch.Tensor | None = None
        if adds or not part_BHWC.is_contiguous():
            strip_BHWC = torch.empty(part_BHWC.shape, dtype=part_BCHW.dtype, device=part_BCHW.device)
            self.strip_BCHW, self._bytes = strip_BHWC.permute(0, 3, 1, 2), as_bytes(strip_BHWC)

    def of(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW.as_strided(*self._view, x_BCHW.storage_offset() + self._offset)

    def carried(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The bytes that travel: the strip's, or those of the tensor itself."""
        if self.strip_BCHW is not None:
            return self._bytes
        return x_BCHW.as_strided((self._length,), (1,), x_BCHW.storage_offset() + self._offset).view(torch.uint8)


class _Way(NamedTuple):
    """One direction of an exchange, for tensors of one layout: what goes out of one, and into what is `made` of it.

    `kept`: what stays on this rank, in both. `blank`: the parts of what is made that nobody owns.
    """

    shape: tuple[int, ...]
    layout: torch.memory_format
    sends: tuple[tuple[int, Part], ...]
    receives: tuple[tuple[int, Part], ...]
    kept: tuple[Part, Part] | None
    blank: tuple[Part, ...]

    @staticmethod
    def forward(x_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: Callable[[int, int], int]) -> _Way:
        made_BCHW = _empty(x_BCHW, exchange.window)
        return _Way(
            made_BCHW.shape,
            _layout(x_BCHW),
            _parts(x_BCHW, exchange.sends, rank_at),
            _parts(made_BCHW, exchange.receives, rank_at),
            exchange.kept and (Part(x_BCHW, exchange.kept[0]), Part(made_BCHW, exchange.kept[1])),
            tuple(Part(made_BCHW, piece) for piece in exchange.outside),
        )

    @staticmethod
    def back(gradient_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: Callable[[int, int], int]) -> _Way:
        made_BCHW = _empty(gradient_BCHW, exchange.owned)
        return _Way(
            made_BCHW.shape,
            _layout(gradient_BCHW),
            _parts(gradient_BCHW, exchange.receives, rank_at),
            _parts(made_BCHW, exchange.sends, rank_at, adds=True),
            exchange.kept and (Part(gradient_BCHW, exchange.kept[1]), Part(made_BCHW, exchange.kept[0])),
            () if exchange.keeps_all else (Part(made_BCHW, Piece(exchange.at)),),
        )

    def empty(self, like_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=self.layout)

    def place(self, x_BCHW: torch.Tensor, fill: float, into_BCHW: torch.Tensor) -> None:
        """What the rank has itself, and what nobody has."""
        for part in self.blank:
            part.of(into_BCHW).fill_(fill)
        if self.kept is not None:
            self.kept[1].of(into_BCHW).copy_(self.kept[0].of(x_BCHW))


class Flight(NamedTuple):
    """An exchange whose messages are under way into parts of what is `made`; `notes`: where what arrives is kept."""

    work: Work
    made_BCHW: torch.Tensor
    arriving: tuple[tuple[int, Part], ...] = ()
    notes: Notes | None = None

    def window(self) -> torch.Tensor:
        """What was wanted, once all of it has arrived."""
        self.work.wait()
        for _, part in self.arriving:
            if part.strip_BCHW is not None:
                part.of(self.made_BCHW).copy_(part.strip_BCHW)
        if self.notes is not None:
            self.notes.add([part.of(self.made_BCHW).clone() for _, part in self.arriving])
        return self.made_BCHW

    def gradient(self) -> torch.Tensor:
        """The sum of what belongs to this rank's block, once all of it has arrived."""
        self.work.wait()
        for _, part in self.arriving:
            assert part.strip_BCHW is not None, "what is added to others has a strip"
            part.of(self.made_BCHW).add_(part.strip_BCHW)
        return self.made_BCHW


@dataclass
class HaloExchanger:
    """Carries the halos of one place in a network. Its strips are allocated once and used again at every step."""

    axes: Axes
    _ways: dict[tuple[Any, ...], _Way] = field(default_factory=dict)

    @property
    def strips(self) -> list[torch.Tensor]:
        """What is kept between steps."""
        parts = (part for way in self._ways.values() for _, part in (*way.sends, *way.receives))
        return [part.strip_BCHW for part in parts if part.strip_BCHW is not None]

    def exchange(self, x_BCHW: torch.Tensor, exchange: BlockExchange | None, fill: float = 0.0) -> torch.Tensor:
        """The window of this rank from the blocks of all. Collective over the ranks of the image.

        `x_BCHW` is this rank's own block along each dim that has an exchange. Beyond the tensor's ends the window holds
        `fill`. Where nothing is to be done (None) x itself is returned. Differentiable: the adjoint adds each part of
        the gradient to its owner, and drops what was filled in.
        """
        if exchange is None:
            return x_BCHW
        result: torch.Tensor = _Exchange.apply(x_BCHW, self, exchange, fill)
        return result

    def start(self, x_BCHW: torch.Tensor, exchange: BlockExchange, fill: float) -> Flight:
        """Posts the messages, and makes what needs none of them; leave x alone until its `window` is there. Without
        autograd. What has been noted is taken as it was, and nothing is posted."""
        way, notes = self._way(_Way.forward, x_BCHW, exchange), current()
        if notes is None or not notes.is_read:
            return self._start(way, x_BCHW, fill)._replace(notes=notes)
        window_BCHW = way.empty(x_BCHW)
        way.place(x_BCHW, fill, window_BCHW)
        for (_, part), arrived_BCHW in zip(way.receives, notes.next(), strict=True):
            part.of(window_BCHW).copy_(arrived_BCHW)
        return Flight(DoneWork(), window_BCHW)

    def start_back(self, gradient_BCHW: torch.Tensor, exchange: BlockExchange) -> Flight:
        """The adjoint: from the gradient of this rank's window to the `gradient` of its own block."""
        return self._start(self._way(_Way.back, gradient_BCHW, exchange), gradient_BCHW, 0.0)

    def _start(self, way: _Way, x_BCHW: torch.Tensor, fill: float) -> Flight:
        made_BCHW = way.empty(x_BCHW)
        for _, part in way.sends:
            if part.strip_BCHW is not None:
                part.strip_BCHW.copy_(part.of(x_BCHW))
        outgoing = [Message(rank, part.carried(x_BCHW)) for rank, part in way.sends]
        incoming = [Message(rank, part.carried(made_BCHW)) for rank, part in way.receives]
        work = self.axes.point_to_point.start(outgoing, incoming)
        way.place(x_BCHW, fill, made_BCHW)
        return Flight(work, made_BCHW, way.receives)

    def _way(self, make: Callable[..., _Way], x_BCHW: torch.Tensor, exchange: BlockExchange) -> _Way:
        key = make, exchange, x_BCHW.shape, x_BCHW.stride(), x_BCHW.dtype, x_BCHW.device
        if key not in self._ways:
            self._ways[key] = make(x_BCHW, exchange, self.axes.rank_at)
        return self._ways[key]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchanger: HaloExchanger, exchange: BlockExchange, fill: float
    ) -> torch.Tensor:
        ctx.exchanger, ctx.exchange = exchanger, exchange
        return exchanger.start(x_BCHW, exchange, fill).window()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchanger.start_back(gradient_BCHW, ctx.exchange).gradient(), None, None, None


def _parts(
    like_BCHW: torch.Tensor, pieces: Iterable[Piece], rank_at: Callable[[int, int], int], adds: bool = False
) -> tuple[tuple[int, Part], ...]:
    return tuple((rank_at(*piece.peer), Part(like_BCHW, piece, adds)) for piece in pieces)


def _layout(like_BCHW: torch.Tensor) -> torch.memory_format:
    """That of what is made; channels last where both would do."""
    plain = like_BCHW.is_contiguous() and not like_BCHW.is_contiguous(memory_format=torch.channels_last)
    return torch.contiguous_format if plain else torch.channels_last


def _empty(like_BCHW: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor:
    """Of other sides (None: the same), without values."""
    height, width = (given if side is None else side for side, given in zip(sides, like_BCHW.shape[2:], strict=True))
    shape = (*like_BCHW.shape[:2], height, width)
    return torch.empty(shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=_layout(like_BCHW))
