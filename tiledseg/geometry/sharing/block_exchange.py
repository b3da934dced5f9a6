"""Both dims of an exchange together: each part of a rank's window comes straight from the rank that owns it.

Along each dim a rank keeps a part of its window and receives others (`decomposition.WindowExchange`). Every pair of a
part along rows and one along columns is a piece of the window: kept where both are, else a message. So a corner comes
from the rank across it, and an exchange is one batch of messages.

    rows:  from rank 0 | kept     cols:  kept | from rank 1     on the rank at (1, 0)

           from (0, 0) | from (0, 1)
           ------------+------------
           kept        | from (1, 1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

from tiledseg.geometry.sharing.decomposition import Decomposition, WindowExchange, plan_exchange

_ALL = slice(None)


class ExchangePiece(NamedTuple):
    """A part of a tensor, counted from its first row and column; `peer`: (row, col) of the rank it goes to or comes
    from."""

    peer: tuple[int, int]
    rows: slice = _ALL
    cols: slice = _ALL


@dataclass(frozen=True, eq=False)  # compared as an object: it is the key of what is made for it
class BlockExchange:
    """The side of the rank at (row, col) = `at` of an exchange along both dims.

    `owned`, `window`: rows and columns before and after it; None along a dim that does not travel. `sends`: pieces of
    the own block. `receives`: pieces of the window, both in the order of ranks. `kept`: what stays, in both (None:
    nothing). `keeps_all`: it is all of the block. `outside`: pieces of the window beyond the tensor's ends.
    """

    at: tuple[int, int]
    owned: tuple[int | None, int | None]
    window: tuple[int | None, int | None]
    sends: tuple[ExchangePiece, ...]
    receives: tuple[ExchangePiece, ...]
    kept: tuple[ExchangePiece, ExchangePiece] | None
    keeps_all: bool
    outside: tuple[ExchangePiece, ...]


def block_exchange(
    rows: WindowExchange | None, cols: WindowExchange | None, at: tuple[int, int]
) -> BlockExchange | None:
    """Return the exchange along both dims of the rank at (row, col) = `at`; None where it has nothing to do."""
    dims = tuple(zip((rows, cols), at, strict=True))
    if all(dim is None or dim.is_identity for dim, _ in dims):
        return None
    sends, stays = _pieces([_parts(i, dim, False) for dim, i in dims], at)
    receives, kept = _pieces([_parts(i, dim, True) for dim, i in dims], at)
    return BlockExchange(
        at,
        (rows.owned.size if rows else None, cols.owned.size if cols else None),
        (rows.window.size if rows else None, cols.window.size if cols else None),
        sends,
        receives,
        (stays, kept) if stays and kept else None,
        all(dim is None or dim.kept == dim.owned for dim, _ in dims),
        tuple(_outside(rows, cols, at)),
    )


@cache  # one object a raster: what is made for it is kept
def context_exchange(image: Decomposition, at: tuple[int, int]) -> BlockExchange | None:
    """Return the exchange after which the rank at (row, col) = `at` has the contexts of all its tiles."""
    rows, cols = image.context_windows()
    return block_exchange(plan_exchange(image.rows, rows, at[0]), plan_exchange(image.cols, cols, at[1]), at)


Parts = list[tuple[int, slice]]


def _parts(index: int, exchange: WindowExchange | None, arrives: bool) -> Parts:
    """Return the parts of the rank's own block and their receivers along one dim, or with `arrives` the parts of its
    window and their senders. Rank `index` itself is one of them, in the order of ranks. A dim that does not travel is
    one part."""
    if exchange is None:
        return [(index, _ALL)]
    transfers, origin = (exchange.receives, exchange.window) if arrives else (exchange.sends, exchange.owned)
    parts = [(each.peer, each.part) for each in transfers] + [(index, exchange.kept)] * (exchange.kept.size > 0)
    return [(peer, part.relative_to(origin.start).slice) for peer, part in sorted(parts)]


def _pieces(dims: Sequence[Parts], at: tuple[int, int]) -> tuple[tuple[ExchangePiece, ...], ExchangePiece | None]:
    """Return every pair of a part along rows and one along columns: those of others, and the rank's own."""
    every = [ExchangePiece((row, col), rows, cols) for (row, rows), (col, cols) in product(*dims)]
    own = next((piece for piece in every if piece.peer == at), None)
    return tuple(piece for piece in every if piece.peer != at), own


def _outside(rows: WindowExchange | None, cols: WindowExchange | None, at: tuple[int, int]) -> Iterator[ExchangePiece]:
    for dim, exchange in (("rows", rows), ("cols", cols)):
        if exchange is not None:
            (before, after), size = exchange.outside, exchange.window.size
            for part in (slice(0, before), slice(size - after, size)):
                if part.stop > part.start:
                    yield ExchangePiece(at, **{dim: part})
