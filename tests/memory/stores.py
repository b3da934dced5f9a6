"""Stores for tests: on a disk, as they are used, and slow ones whose copies end at any time and in any order."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiledseg.memory.file_store import Bytes, FileStore
from tiledseg.memory.host import HostMover
from tiledseg.memory.mover import PAGE, Copying, Mover, Slot
from tiledseg.memory.offload import Offload

ROOM = 1 << 28


class SlowStore(FileStore):
    """A store each copy of which takes up to half a millisecond longer."""

    def _move(self, move: Any, slot: Slot, data: Bytes) -> None:
        time.sleep(random.Random(slot.offset + (slot.size if move is os.pwritev else 0)).uniform(0, 0.0005))
        super()._move(move, slot, data)


def offload(folder: Path, budget: int, kind: type[FileStore] = FileStore, least: int = 1) -> Offload:
    """Everything of `least` bytes on may be moved."""
    return Offload(lambda: kind(folder, ROOM), budget, least)


class _Memory(NamedTuple):
    """Memory that a copy reads or writes and does not hold: a device's copies hold nothing either."""

    storage: StorageWeakRef
    offset: int
    size: int

    @classmethod
    def of(cls, flat_P: torch.Tensor) -> _Memory:
        return cls(StorageWeakRef(flat_P.untyped_storage()), int(flat_P.storage_offset()), flat_P.numel())

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "memory was given back before a copy had ended, and nobody had waited for it"
        return torch.empty(0, dtype=torch.uint8).set_(storage)[self.offset : self.offset + self.size]


class LateMover(HostMover):
    """A mover of a device that is none: each copy is made as late as it may be, or (by `luck`) at some time before.
    Until then what it brings is no number of anybody's."""

    poison = 0xA5

    def __init__(self, seed: int, limit: int = ROOM, chunk: int = 3 * PAGE, luck: float = 0.3) -> None:
        Mover.__init__(self, "the store in the host's memory", limit)
        self._chunk, self._host = chunk, []
        self._draw, self._luck = random.Random(seed), luck
        self.going_out: list[LateCopy] = []
        self.coming_in: list[LateCopy] = []

    def _look(self) -> None:
        """Computing is over when it returns here."""

    def _host_memory(self, size: int) -> torch.Tensor:
        return torch.full((size,), self.poison, dtype=torch.uint8)

    def _copy_out(self, flat_P: torch.Tensor, parts: Sequence[torch.Tensor]) -> Copying:
        self.going_out.append(LateCopy(self, [*self.going_out], flat_P.split([len(part) for part in parts]), parts))
        return self.going_out[-1]

    def _copy_back(self, parts: Sequence[torch.Tensor], flat_P: torch.Tensor, after: Copying) -> Copying:
        assert isinstance(after, LateCopy)
        flat_P.fill_(self.poison)
        targets = flat_P.split([len(part) for part in parts])
        self.coming_in.append(LateCopy(self, [after, *self.coming_in], parts, targets))
        return self.coming_in[-1]

    def lucky(self) -> bool:
        return self._draw.random() < self._luck

    def forget(self, copied: LateCopy) -> None:
        for lane in (self.going_out, self.coming_in):
            if copied in lane:
                lane.remove(copied)

    def settle(self) -> None:
        for copied in (*self.going_out, *self.coming_in):
            copied.make()


class LateCopy:
    def __init__(
        self,
        mover: LateMover,
        after: Sequence[LateCopy],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._mover, self._after = mover, list(after)
        self._pairs = [(_Memory.of(a), _Memory.of(b)) for a, b in zip(sources, targets, strict=True)]
        self._made = False

    def make(self) -> None:
        if self._made:
            return
        self._made = True
        for before in self._after:
            before.make()
        self._after.clear()
        with torch.no_grad():
            for source, target in self._pairs:
                target.tensor().copy_(source.tensor())
        self._mover.forget(self)

    def done(self) -> bool:
        if self._mover.lucky():
            self.make()
        return self._made

    def wait(self) -> None:
        self.make()

    stop = wait


def to_host(budget: int, seed: int = 0, least: int = 1, chunk: int = 3 * PAGE, limit: int = ROOM) -> Offload:
    """The same to the host's memory, by lanes that are late. With small chunks most slots lie in several."""
    return Offload(lambda: LateMover(seed, limit, chunk), budget, least)
