"""Copies that run in threads, and how their end is awaited."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

from tiledseg.memory.disk.aligned import Bytes


class Transfer:
    """One copy, which runs in pieces. Reads may wait for writes, never the other way: so nobody waits in a circle.

    `parts`: the memory that pieces are still to copy. Each takes its own out as it begins, and nothing else may hold
    it: a pool's thread keeps what it was given for a while after its piece has ended, and a stopped one until it comes
    to it.
    """

    def __init__(self, pieces: Sequence[Future[None]], parts: dict[int, Bytes]) -> None:
        self._pieces, self._parts = tuple(pieces), parts

    def done(self) -> bool:
        """Whether all has been copied, or has failed. Does not wait."""
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        """Return once all is copied. Raises the first piece's error, after all have ended: no thread reads or writes
        the buffer any more.

        Each time it is a new object: the one that lasts would remember the frames of all who waited, and so keep what
        they hold.
        """
        errors = [error for piece in self._pieces if (error := _error_of(piece)) is not None]
        if errors:
            raise copy.copy(errors[0]) from errors[0]

    def stop(self) -> None:
        """Return once no piece runs; those not begun never will. Errors are passed over: nobody wants the copy."""
        for piece in [piece for piece in self._pieces if not piece.cancel()]:
            _error_of(piece)
        self._parts.clear()


def _error_of(piece: Future[None]) -> BaseException | None:
    """What the piece has failed with, once it has ended. It is not raised here, for the same reason."""
    try:
        return piece.exception()
    except CancelledError as error:
        return error
