"""The ledger of all storages that autograd keeps: decides which leave memory and when they come back.

A storage leaves once only autograd holds it. Nothing can change its bytes any more, so the copy outside is final: no
view, user or in-place operation sees a difference. A storage with another holder (a weight, a batch, a skip that the
network's code still names) stays: offloading it would free no memory.

    forward     the oldest storages leave as soon as the budget is exceeded: the backward pass needs them last
    backward    a storage comes back when it is used; those saved right before it are prefetched as far as there is room
"""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiledseg.memory.mover import Copy, Figures, Mover
from tiledseg.memory.saved import SavedTensor, StorageView, held_by, may_move, overwritten, storage_key

_AHEAD = 32  # storages, saved before the last used one, that are considered for a prefetch


class SavedView:
    """A view of a storage that may leave. `alias` is None while it is away."""

    __slots__ = ("__weakref__", "_left_at", "_version", "alias", "entry", "view")

    def __init__(self, tensor: torch.Tensor, entry: StorageEntry) -> None:
        self.alias: torch.Tensor | None = tensor.detach()
        self._version = self._left_at = tensor._version
        self.view, self.entry = StorageView.of(tensor), entry

    def leave(self) -> None:
        """Drop the bytes in memory: they have a copy outside."""
        assert self.alias is not None, "the bytes are in memory"
        self._left_at, self.alias = self.alias._version, None

    def check(self, written: int = 0) -> None:
        """Raise RuntimeError, as autograd does, if the bytes were overwritten after they were saved. `written`: times
        since they came back."""
        version = (self._left_at if self.alias is None else self.alias._version) + written
        if version != self._version:
            raise overwritten(self.view.dtype, self.view.shape, version, self._version)


class Place(Enum):
    """The place of a storage's bytes. SHARED: in memory, held by others than autograd too. STAYING: only autograd holds
    them. LEAVING: the same, and they are being copied out."""

    SHARED, STAYING, LEAVING, OUTSIDE = range(4)


@dataclass(eq=False)
class StorageEntry:
    """A storage that autograd keeps. `sent`: its copy outside, from LEAVING on; `flat_P`: its bytes while LEAVING;
    `brought`: its bytes in memory again, while it is OUTSIDE.

    `key` identifies the storage while it is in memory, `number` forever. `used`: uses since it came back, or ever: a
    used one leaves no more. `wanted`: saved views when it came back, each of which will use it.
    """

    number: int
    key: int
    size: int
    place: Place | None = None
    used: int = 0
    wanted: int = 0
    sent: Copy | None = None
    flat_P: torch.Tensor | None = None
    brought: tuple[torch.Tensor, Copy] | None = None
    saved: list[weakref.ref[SavedView]] = field(default_factory=list)

    def views(self) -> list[SavedView]:
        return [saved for reference in self.saved if (saved := reference()) is not None]

    def aliases(self) -> list[torch.Tensor]:
        """Return the views that are in memory."""
        return [saved.alias for saved in self.views() if saved.alias is not None]


class Ledger:
    """The saved-tensor hooks `pack` and `unpack` of one context, thread-safe. The mover closes with the last graph.

    `budget`: bytes that only autograd may hold in memory. `least`: the smallest storage, in bytes, that is moved.
    """

    def __init__(self, mover: Mover, budget: int, least: int, figures: Figures) -> None:
        self._mover, self._budget, self._least, self.figures = mover, budget, least, figures
        self._lock = threading.RLock()
        self._at: dict[Place, dict[int, StorageEntry]] = {place: {} for place in Place}  # oldest first
        self._bytes = dict.fromkeys(Place, 0)
        self._in_memory: dict[int, StorageEntry] = {}  # by key
        self._dropped: queue.SimpleQueue[StorageEntry] = queue.SimpleQueue()  # those of dropped views, from any thread
        self._ahead: list[tuple[StorageWeakRef, int]] = []  # prefetched storages and their bytes
        self._count = self._step_peak = 0
        self._was_used = False  # in this step
        weakref.finalize(self, mover.close)  # autograd's graphs hold the ledger by its hooks

    @property
    def resident_bytes(self) -> int:
        """The bytes in memory that only autograd holds."""
        return self._bytes[Place.STAYING] + self._bytes[Place.LEAVING]

    @property
    def _kept_bytes(self) -> int:
        """The bytes in memory or outside that only autograd holds."""
        return self.resident_bytes + self._bytes[Place.OUTSIDE]

    def _put(self, entry: StorageEntry, place: Place | None) -> None:
        """Move a storage to a place; None: nowhere, it has ended."""
        if entry.place is not None:
            del self._at[entry.place][entry.number]
            self._bytes[entry.place] -= entry.size
        if entry.place not in (None, Place.OUTSIDE) and place in (None, Place.OUTSIDE):
            del self._in_memory[entry.key]
        entry.place = place
        if place is not None:
            self._at[place][entry.number] = entry
            self._bytes[place] += entry.size

    # Called by autograd.

    def pack(self, tensor: torch.Tensor) -> SavedTensor | SavedView:
        """Save a tensor. Raises WriteError or MemoryLimitError if the store refuses a storage that must leave."""
        with self._lock:
            self._settle()
            if not may_move(tensor, self._least) or not self._mover.takes(tensor):
                self._move_out()
                return SavedTensor(tensor)
            entry, dropped = self._entry_of(tensor), self._dropped
            saved = SavedView(tensor, entry)
            entry.saved.append(weakref.ref(saved, lambda _: dropped.put(entry)))
            self._move_out()
            return saved

    def _entry_of(self, tensor: torch.Tensor) -> StorageEntry:
        key = storage_key(tensor)
        if key not in self._in_memory:
            self._count += 1
            made = self._in_memory[key] = StorageEntry(self._count, key, tensor.untyped_storage().nbytes())
            self._put(made, Place.SHARED)
        return self._in_memory[key]

    def unpack(self, saved: SavedTensor | SavedView) -> torch.Tensor:
        """Return the tensor, bit for bit. Raises RuntimeError if it was overwritten, WriteError if its bytes cannot be
        read."""
        if isinstance(saved, SavedTensor):
            return saved.get()
        with self._lock:
            self._settle()
            saved.check()
            tensor = self._use(saved)
            self._prefetch_before(saved.entry)
            self._move_out()
            return tensor

    # Called by the context.

    def look(self) -> None:
        """Send out storages beyond the budget that only autograd holds by now. Raises as `pack`."""
        with self._lock:
            self._settle()
            self._move_out()

    def end_step(self) -> int | None:
        """Begin a step; return the most bytes that only autograd held in the last one, in memory and outside. If none
        was used since the last step began, that step goes on: return None."""
        with self._lock:
            if not self._was_used:
                return None
            peak, self._step_peak, self._was_used = self._step_peak, self._kept_bytes, False
            return peak

    # The way out.

    def _move_out(self) -> None:
        """Send out the oldest storages until the others fit the budget; wait while memory holds more than the
        budget."""
        for entry in list(self._at[Place.SHARED].values()):
            aliases = entry.aliases()
            if aliases and held_by(aliases[0], len(aliases)):
                self._put(entry, Place.STAYING)
        self._step_peak = max(self._step_peak, self._kept_bytes)
        ahead = self._ahead_bytes()
        room = self._budget - ahead
        if self._bytes[Place.STAYING] > room:
            for entry in [entry for entry in self._at[Place.STAYING].values() if not entry.used]:
                storage = entry.aliases()[0].untyped_storage()
                flat_P = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                entry.sent, entry.flat_P = self._mover.send(flat_P), flat_P  # after it, since it may have no room
                self._put(entry, Place.LEAVING)
                self.figures.bytes_out += entry.size
                if self._bytes[Place.STAYING] <= room:
                    break
        leaving = self._at[Place.LEAVING]
        while leaving and self.resident_bytes > room:
            self._finish_leaving(next(iter(leaving.values())))
        self.figures.peak_bytes = max(self.figures.peak_bytes, self.resident_bytes + ahead)

    def _ahead_bytes(self) -> int:
        """Return the bytes of prefetched storages that still live."""
        self._ahead = [(storage, size) for storage, size in self._ahead if not storage.expired()]
        return sum(size for _, size in self._ahead)

    def _finish_leaving(self, entry: StorageEntry) -> None:
        """Wait for a storage's copy out, then drop its bytes in memory. If the copy fails, raise its error and keep
        them."""
        assert entry.sent is not None, "its bytes have been sent"
        entry.sent.wait()
        self._put(entry, Place.OUTSIDE)
        entry.flat_P, entry.used = None, 0
        for saved in entry.views():
            saved.leave()

    # The way back.

    def _use(self, saved: SavedView) -> torch.Tensor:
        entry, self._was_used = saved.entry, True
        entry.used += 1
        if saved.alias is not None:
            return saved.alias
        flat_P, copying = entry.brought or self._bring(entry)
        copying.wait()
        saved.check(flat_P._version)
        tensor = saved.view.over(flat_P)
        if entry.used >= entry.wanted:  # autograd holds it now; another backward pass brings it again
            entry.brought, entry.used = None, 0
        return tensor

    def _bring(self, entry: StorageEntry) -> tuple[torch.Tensor, Copy]:
        assert entry.sent is not None, "its bytes are outside"
        entry.brought, entry.wanted = self._mover.bring(entry.sent), len(entry.views())
        self.figures.bytes_in += entry.size
        return entry.brought

    def _prefetch_before(self, entry: StorageEntry) -> None:
        """Prefetch the storages saved right before `entry`, as far as the budget has room."""
        for number in range(entry.number - 1, max(0, entry.number - 1 - _AHEAD), -1):
            before = self._at[Place.OUTSIDE].get(number)
            if before is not None and before.brought is None and not before.used:
                if self.resident_bytes + self._ahead_bytes() + before.size > self._budget:
                    return
                storage = self._bring(before)[0].untyped_storage()
                self._ahead.append((StorageWeakRef(storage), storage.nbytes()))

    # The end of a storage.

    def _settle(self) -> None:
        """Process finished copies, and free storages without views."""
        while not self._dropped.empty():  # no other thread takes from it: this one has the lock
            entry = self._dropped.get()
            if entry.place is not None and not entry.views():
                self._free(entry)
        for entry in list(self._at[Place.LEAVING].values()):
            if entry.sent is not None and entry.sent.done():
                self._finish_leaving(entry)

    def _free(self, entry: StorageEntry) -> None:
        self._put(entry, None)
        if entry.brought is not None:
            entry.brought[1].stop()
        if entry.sent is not None:
            self._mover.drop(entry.sent)
