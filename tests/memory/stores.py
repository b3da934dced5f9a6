"""Stores for tests: on a disk, as they are used, and slow ones whose copies end at any time and in any order."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiledseg.memory.file_store import Bytes, FileStore
from tiledseg.memory.mover import Copy, Mover, Slot
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


class LateMover(Mover):
    """A mover of a device that is none: each copy is made as late as it may be, or (by `luck`) at some time before.
    Until then what it brings is no number of anybody's. Its copies hold no memory, as a device's."""

    def __init__(self, seed: int, limit: int = ROOM, luck: float = 0.3) -> None:
        super().__init__("the store in the host's memory", limit)
        self.draw, self.luck = random.Random(seed), luck
        self.store_P = torch.full((0,), 0xA5, dtype=torch.uint8)
        self.lanes: tuple[list[LateCopy], list[LateCopy]] = [], []

    def _start(self, slot: Slot, flat_P: torch.Tensor, sent: Copy | None) -> Copy:
        if isinstance(sent, LateCopy):
            flat_P.data.fill_(0xA5)
            return LateCopy(self, 1, slot, flat_P, [sent, *self.lanes[1]])
        missing = slot.stop - len(self.store_P)
        self.store_P = torch.cat([self.store_P, self.store_P.new_full((max(0, missing),), 0xA5)])
        return LateCopy(self, 0, slot, flat_P, [*self.lanes[0]])


class LateCopy(Copy):
    """A copy on lane 0, out, or 1, in, made after others."""

    def __init__(
        self, mover: LateMover, lane: int, slot: Slot, flat_P: torch.Tensor, after: Sequence[LateCopy]
    ) -> None:
        super().__init__(slot)
        self._mover, self._lane, self._after = mover, lane, after
        self._storage, self._made = StorageWeakRef(flat_P.untyped_storage()), False
        mover.lanes[lane].append(self)

    def wait(self) -> None:
        if self._made:
            return
        self._made = True
        for before in self._after:
            before.wait()
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "memory was given back before a copy had ended, and nobody had waited for it"
        there_P = self._mover.store_P[self.slot.offset :][: self.slot.size]
        memory_P = torch.empty(0, dtype=torch.uint8).set_(storage)
        source_P, target_P = (there_P, memory_P) if self._lane else (memory_P, there_P)
        target_P.copy_(source_P)
        self._after = ()
        self._mover.lanes[self._lane].remove(self)

    stop = wait

    def done(self) -> bool:
        if self._mover.draw.random() < self._mover.luck:
            self.wait()
        return self._made


def to_host(budget: int, seed: int = 0, limit: int = ROOM) -> Offload:
    """The same by copies that are late."""
    return Offload(lambda: LateMover(seed, limit), budget, 1)
