"""Which bytes of a store are taken: slots of whole pages, handed out and taken back. Pure.

A slot goes to the lowest place that holds it, so that a store whose slots come and go in the same order at every step
stays as long as it was at the first.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

PAGE = 4096
"""Bytes of a page: what direct input and output wants of offsets, lengths and addresses on any disk in use."""


def whole_pages(count: int) -> int:
    """`count` bytes, rounded up to pages; one page at least."""
    return max(1, -(-count // PAGE)) * PAGE


@dataclass(frozen=True)
class Slot:
    """`size` bytes from `offset` on, which lies at a page's begin; the store holds whole pages of them."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + whole_pages(self.size)


class SlotTable:
    """The slots of one store. Not safe for several threads: its owner has the lock."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (begin, end) of gaps below `end`, in order, none touching another
        self.end = 0
        self.taken = 0

    def take(self, size: int) -> Slot:
        """A slot of `size` bytes, at least one page, in the lowest gap that holds it; else at the end."""
        needed = whole_pages(size)
        offset = self._lowest_gap(needed)
        self.taken += needed
        return Slot(offset, size)

    def stop_of(self, size: int) -> int:
        """Where the store would end if a slot of `size` bytes were taken now."""
        needed = whole_pages(size)
        return self.end if any(b - a >= needed for a, b in self._free) else self._open_end() + needed

    def give_back(self, slot: Slot) -> None:
        """The slot's bytes are free again. They must have been taken, and given back no time before."""
        begin, stop = slot.offset, slot.stop
        at = bisect.bisect(self._free, (begin, stop))
        before = self._free[at - 1] if at else (0, 0)
        after = self._free[at] if at < len(self._free) else (self.end, self.end)
        assert before[1] <= begin < stop <= after[0], f"{slot} is given back, but was not taken"
        self.taken -= stop - begin
        joins_before, joins_after = bool(at) and before[1] == begin, after[0] == stop and at < len(self._free)
        merged = (before[0] if joins_before else begin, after[1] if joins_after else stop)
        self._free[at - joins_before : at + joins_after] = [merged]

    def _lowest_gap(self, needed: int) -> int:
        for at, (begin, stop) in enumerate(self._free):
            if stop - begin >= needed:
                self._free[at : at + 1] = [(begin + needed, stop)] if stop - begin > needed else []
                return begin
        begin = self._open_end()
        if self._free and self._free[-1][1] == self.end:
            self._free.pop()
        self.end = begin + needed
        return begin

    def _open_end(self) -> int:
        """Where the gap at the end of the store begins."""
        return self._free[-1][0] if self._free and self._free[-1][1] == self.end else self.end
