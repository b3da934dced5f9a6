"""What an exchange copies and sends, as views of a rank's tensors: worked out once for each layout of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tiledseg.comm.transports.collectives import as_bytes
from tiledseg.geometry.sharing.block_exchange import BlockExchange, Piece

RankAt = Callable[[int, int], int]
Take = Callable[["Part", torch.Tensor], Any]
"""Puts what a part of the tensor at hand comes to into a tensor of its size."""


class Part:
    """A part of every tensor of one layout, and the strip by which it travels where it does not lie in one piece, or
    `apart` from it: added to what is there, or made of it. Bytes travel channels last."""

    def __init__(self, like_BCHW: torch.Tensor, piece: Piece, apart: bool = False) -> None:
        self._piece = piece
        part_BCHW = self.beside(like_BCHW)
        self._view = part_BCHW.shape, part_BCHW.stride()
        self._offset = part_BCHW.storage_offset() - like_BCHW.storage_offset()
        self._length = part_BCHW.numel()
        part_BHWC = part_BCHW.permute(0, 2, 3, 1)
        self.strip_BCHW: torch.Tensor | None = None
        if apart or not part_BHWC.is_contiguous():
            strip_BHWC = torch.empty(part_BHWC.shape, dtype=part_BCHW.dtype, device=part_BCHW.device)
            self.strip_BCHW, self._bytes = strip_BHWC.permute(0, 3, 1, 2), as_bytes(strip_BHWC)

    def of(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW.as_strided(*self._view, x_BCHW.storage_offset() + self._offset)

    def beside(self, y_BCHW: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor of any layout."""
        return y_BCHW[:, :, self._piece.rows, self._piece.cols]

    def carried(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The bytes that travel: the strip's, or those of the tensor itself."""
        if self.strip_BCHW is not None:
            return self._bytes
        return x_BCHW.as_strided((self._length,), (1,), x_BCHW.storage_offset() + self._offset).view(torch.uint8)


class Way(NamedTuple):
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
    def forward(x_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: RankAt) -> Way:
        made_BCHW = _empty(x_BCHW, exchange.window)
        return Way(
            made_BCHW.shape,
            _layout(x_BCHW),
            _parts(x_BCHW, exchange.sends, rank_at),
            _parts(made_BCHW, exchange.receives, rank_at),
            exchange.kept and (Part(x_BCHW, exchange.kept[0]), Part(made_BCHW, exchange.kept[1])),
            tuple(Part(made_BCHW, piece) for piece in exchange.outside),
        )

    @staticmethod
    def back(gradient_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: RankAt, apart: bool = False) -> Way:
        """`apart`: what is sent is made of the gradient, not a part of it."""
        made_BCHW = _empty(gradient_BCHW, exchange.owned)
        return Way(
            made_BCHW.shape,
            _layout(gradient_BCHW),
            _parts(gradient_BCHW, exchange.receives, rank_at, apart),
            _parts(made_BCHW, exchange.sends, rank_at, apart=True),
            exchange.kept and (Part(gradient_BCHW, exchange.kept[1]), Part(made_BCHW, exchange.kept[0])),
            () if exchange.keeps_all else (Part(made_BCHW, Piece(exchange.at)),),
        )

    @staticmethod
    def back_apart(gradient_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: RankAt) -> Way:
        return Way.back(gradient_BCHW, exchange, rank_at, apart=True)

    @property
    def own(self) -> Part:
        """What stays, in the tensor at hand."""
        assert self.kept is not None, "there is such a part"
        return self.kept[0]

    @staticmethod
    def back_in_place(gradient_BCHW: torch.Tensor, exchange: BlockExchange, rank_at: RankAt) -> Way:
        """What arrives is added to the gradient where it lies, of which the block's is the part that is kept."""
        assert exchange.kept is not None, "the window holds the block"
        kept = Part(gradient_BCHW, exchange.kept[1])
        own_BCHW = kept.of(gradient_BCHW)
        return Way(
            own_BCHW.shape,
            _layout(gradient_BCHW),
            _parts(gradient_BCHW, exchange.receives, rank_at),
            _parts(own_BCHW, exchange.sends, rank_at, apart=True),
            (kept, kept),
            (),
        )

    def empty(self, like_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=self.layout)

    def place(self, take: Take, fill: float, into_BCHW: torch.Tensor) -> None:
        """What the rank has itself, and what nobody has."""
        for part in self.blank:
            part.of(into_BCHW).fill_(fill)
        if self.kept is not None:
            take(self.kept[0], self.kept[1].of(into_BCHW))


def _parts(
    like_BCHW: torch.Tensor, pieces: Iterable[Piece], rank_at: RankAt, apart: bool = False
) -> tuple[tuple[int, Part], ...]:
    return tuple((rank_at(*piece.peer), Part(like_BCHW, piece, apart)) for piece in pieces)


def _layout(like_BCHW: torch.Tensor) -> torch.memory_format:
    """That of what is made; channels last where both would do."""
    plain = like_BCHW.is_contiguous() and not like_BCHW.is_contiguous(memory_format=torch.channels_last)
    return torch.contiguous_format if plain else torch.channels_last


def _empty(like_BCHW: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor:
    """Of other sides (None: the same), without values."""
    height, width = (given if side is None else side for side, given in zip(sides, like_BCHW.shape[2:], strict=True))
    shape = (*like_BCHW.shape[:2], height, width)
    return torch.empty(shape, dtype=like_BCHW.dtype, device=like_BCHW.device, memory_format=_layout(like_BCHW))
