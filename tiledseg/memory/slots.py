"""Slots of a store: whole pages, handed out and taken back. Pure.

A slot goes to the lowest place that holds it, so that a store whose slots come and go in the same order at every step
stays as long as it was at the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.errors import MemoryLimitError

PAGE = 4096
"""Bytes of a page."""


@dataclass(frozen=True)
class Slot:
    """`size` bytes from `offset` on, which lies at a page's begin. The store holds whole pages, at least one."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + max(1, -(-self.size // PAGE)) * PAGE


class SlotTable:
    """The slots of one store, `name` in errors, of at most `limit` bytes. Its owner keeps other threads out."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self.limit = name, limit
        self._gaps: list[tuple[int, int]] = []  # (begin, stop) below `end`, in order, none touching another
        self.end = 0
        self.taken = 0

    def find(self, size: int) -> Slot:
        """Return the lowest slot of `size` bytes that is free. Raises MemoryLimitError beyond the limit."""
        open_end = self._gaps[-1][0] if self._gaps and self._gaps[-1][1] == self.end else self.end
        needed = Slot(0, size).stop
        slot = Slot(next((begin for begin, stop in self._gaps if stop - begin >= needed), open_end), size)
        if slot.stop > self.limit:
            raise MemoryLimitError(
                f"{self._name} may have {self.limit} bytes, of which {self.taken} are taken, but {size} more are asked "
                f"for; give it at least {slot.stop}, or keep more in memory"
            )
        return slot

    def take(self, slot: Slot) -> None:
        """Take a slot that `find` has returned."""
        self.end = max(self.end, slot.stop)
        self.taken += slot.stop - slot.offset
        parts = ((max(begin, slot.stop), stop) if begin == slot.offset else (begin, stop) for begin, stop in self._gaps)
        self._gaps = [(begin, stop) for begin, stop in parts if begin < stop]

    def give_back(self, slot: Slot) -> None:
        """Free a slot that has been taken."""
        self.taken -= slot.stop - slot.offset
        joined: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._gaps, (slot.offset, slot.stop)]):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], stop
            else:
                assert not joined or joined[-1][1] < begin, f"{slot} is given back, but was not taken"
                joined.append((begin, stop))
        self._gaps = joined
