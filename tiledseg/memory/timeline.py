"""What one step saves and uses, in order: recorded in the first, expected in the next. Values and lists only.

A step is a run of saves (the forward pass) and the uses that follow (the backward pass). Its clock ticks at every save
and every use of a storage that is large enough to be moved.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from tiledseg.records import dataclass


class Sign(NamedTuple):
    """By what a save is known again at the next step: which of the step's storages, its bytes, and the view of it."""

    storage: int
    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str


@dataclass
class Life:
    """One storage in a step: `size` in bytes; `alone`: the clock's tick from which autograd alone held it (None: never,
    somebody else holds it too); `uses`: ticks at which its values were wanted; `freed`: the first tick without it
    (None: it was there to the end)."""

    size: int
    alone: int | None = None
    uses: list[int] = field(default_factory=list)
    freed: int | None = None


@dataclass
class Record:
    """One step as it happened, storages numbered in the order of their first save."""

    signs: list[Sign] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    used: list[int] = field(default_factory=list)  # storages, in the order of their uses
    clock: int = 0

    def add_storage(self, size: int) -> int:
        """The number of a storage that has not been saved before."""
        self.lives.append(Life(size))
        return len(self.lives) - 1

    def save(self, sign: Sign) -> None:
        self.clock += 1
        self.signs.append(sign)

    def use(self, storage: int) -> None:
        self.clock += 1
        self.lives[storage].uses.append(self.clock)
        self.used.append(storage)

    def alone(self, storage: int) -> None:
        self.lives[storage].alone = self.clock

    def freed(self, storage: int) -> None:
        self.lives[storage].freed = self.clock + 1

    @property
    def in_backward(self) -> bool:
        return bool(self.used)

    def same_as(self, other: Record) -> bool:
        return self.signs == other.signs and self.used == other.used
