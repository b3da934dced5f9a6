"""The ledger of all storages that autograd keeps: which leave memory, when they come back, and that bytes stay right.

A storage leaves once autograd alone holds it. Nobody can change its bytes any more, so the copy outside is final: no
view, no user and no in-place operation can see a difference. A storage that somebody else holds (a weight, a batch, a
skip that the network's code still names) would free no memory, and stays.

    forward     the oldest storages leave as soon as the budget is exceeded: the backward pass needs them last
    backward    a storage comes back when it is used; those saved right before it are prefetched as far as there is room
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiledseg.memory.mover import Brought, Figures, Mover, Sent
from tiledseg.memory.saved import Saved, StorageKey, UnmovedTensor, held_by, may_move, overwritten, storage_key

_LOOK_SECONDS = 0.25
_AHEAD = 32  # storages before the last used one that are looked at for a prefetch


class State(enum.Enum):
    """The place of a storage's bytes."""

    RESIDENT = "in memory"
    LEAVING = "in memory, and being copied out"
    AWAY = "outside"
    RETURNING = "outside, and in memory as soon as its copy has ended"


@dataclass(eq=False)
class StorageEntry:
    """A storage that autograd keeps.

    `key` identifies the storage while it is in memory (RESIDENT, LEAVING), `number` forever. `alone`: nobody but
    autograd holds it. `live`: saved views of it. `used`: uses since it came back, or ever; `wanted`: views saved when
    it came back, each of which will use it.
    """

    number: int
    key: StorageKey
    size: int
    state: State = State.RESIDENT
    alone: bool = False
    live: int = 0
    used: int = 0
    wanted: int = 0
    sent: Sent | None = None
    flat_P: torch.Tensor | None = None  # all its bytes, while they are copied out
    brought: Brought | None = None
    _saved: list[weakref.ref[Saved]] = field(default_factory=list)
    _watched: list[torch.Tensor] = field(default_factory=list)

    @property
    def outward(self) -> Sent:
        assert self.sent is not None, "its bytes have been sent"
        return self.sent

    @property
    def inward(self) -> Brought:
        assert self.brought is not None, "its bytes are on their way back, or there"
        return self.brought

    def add(self, saved: Saved) -> None:
        self.live += 1
        self._saved.append(weakref.ref(saved))

    def saved(self) -> list[Saved]:
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def find_alone(self) -> bool:
        """Return True if autograd alone holds the storage now."""
        aliases = [saved.alias for saved in self.saved() if saved.alias is not None]
        self.alone = bool(aliases) and held_by(aliases[0], len(aliases))
        return self.alone

    def whole(self) -> torch.Tensor:
        """Return all bytes of the storage, which is in memory, as one tensor."""
        alias = next(saved.alias for saved in self.saved() if saved.alias is not None)
        flat_P = torch.empty(0, dtype=torch.uint8, device=alias.device)
        return flat_P.set_(alias.untyped_storage())

    def watch(self, flat_P: torch.Tensor) -> None:
        """Count writes to `flat_P`, and to views of it, without holding its bytes."""
        self._watched = [tensor for tensor in self._watched if tensor._version]
        watching = flat_P.detach()
        watching.data = torch.empty(0, dtype=torch.uint8)  # the version stays that of `flat_P`
        self._watched.append(watching)

    def version(self) -> int:
        """Return how often a backward pass has written over what it was given."""
        return sum(tensor._version for tensor in self._watched)


class Ledger:
    """The hooks of one context, `pack` and `unpack`, from any thread.

    `budget`: bytes that autograd alone may hold in memory. `least`: the smallest storage, in bytes, that is moved.
    `told`: a step ends at `end_step` alone; else a save after a backward pass begins a step.
    """

    def __init__(self, mover: Mover, budget: int, least: int, figures: Figures, told: bool = False) -> None:
        self._mover, self._budget, self._least, self._told = mover, budget, least, told
        self.figures = figures
        self._lock = threading.RLock()
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._entries: dict[int, StorageEntry] = {}
        self._by_key: dict[StorageKey, StorageEntry] = {}
        self._held_by_others: dict[StorageEntry, None] = {}
        self._staying: dict[StorageEntry, None] = {}  # autograd alone holds them; oldest first
        self._leaving: dict[StorageEntry, None] = {}
        self._prefetched: list[tuple[StorageWeakRef, int]] = []
        self._alone_bytes = self._leaving_bytes = self._count = 0
        self._kept_bytes = self._step_peak = self.last_peak = 0  # in memory or outside
        self._in_backward = self._has_saved = False
        self._closed = self._left = False
        self._over = threading.Event()
        # Begun now: where memory has run out, no thread can be begun.
        threading.Thread(target=self._await_the_last, name="memory-close", daemon=True).start()

    # Called by autograd.

    def pack(self, tensor: torch.Tensor) -> UnmovedTensor | Saved:
        """Save a tensor. Raises WriteError or MemoryLimitError where the store does not take what must leave."""
        with self._lock:
            self._settle()
            movable = may_move(tensor, self._least) and self._mover.takes(tensor)
            saved = self._save(tensor) if movable else UnmovedTensor(tensor)
            self._move_out()
            return saved

    def unpack(self, saved: UnmovedTensor | Saved) -> torch.Tensor:
        """Return the tensor, bit for bit. Raises RuntimeError where it was written over, WriteError where its bytes
        cannot be read."""
        if isinstance(saved, UnmovedTensor):
            return saved.tensor()
        with self._lock:
            self._settle()
            saved.check()
            entry = self._entries[saved.number]
            tensor = self._use(entry, saved)
            self._prefetch_before(entry)
            self._move_out()
            return tensor

    # Called by the context.

    def look(self) -> None:
        """Send away what must leave and is held by autograd alone by now. Raises as `pack`."""
        with self._lock:
            self._settle()
            self._move_out()

    def leave(self) -> None:
        """End the context: give everything back, now or once the last graph that was made in it is gone."""
        with self._lock:
            self._forget_dropped()
            self._end_step()
            self._left = True
            if not self._entries:
                self.close()
        self._over.set()

    def end_step(self) -> bool:
        """Begin the next step if one has just ended; return True if so."""
        with self._lock:
            over = self._in_backward if self._told else self._step_is_over()
            if over:
                self._end_step()
            return over

    def close(self) -> None:
        """Close the mover, once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._mover.close()
                self.count_stalls()

    def count_stalls(self) -> None:
        """Add the seconds that a device, not the host, has waited for copies so far."""
        with self._lock:
            self.figures.waited_seconds += self._mover.stood_still()

    @property
    def resident_bytes(self) -> int:
        """The bytes that autograd alone holds in memory."""
        return self._alone_bytes

    # Steps.

    def _end_step(self) -> None:
        if self._in_backward:
            self.figures.steps += 1
            self.last_peak = self._step_peak
        self._in_backward = self._has_saved = False
        self._step_peak = self._kept_bytes

    def _step_is_over(self) -> bool:
        """Return True if a save now begins a step: outside a backward pass, after a use or where nothing is left of
        the last step."""
        if self._told or torch._C._current_graph_task_id() != -1:
            return False
        return self._in_backward or (self._has_saved and not self._entries)

    # Saves.

    def _save(self, tensor: torch.Tensor) -> Saved:
        if self._step_is_over():
            self._end_step()
        self._has_saved = True
        entry = self._by_key.get(storage_key(tensor)) or self._new_entry(tensor)
        saved = Saved(tensor, entry.number, self._dropped.put)
        entry.add(saved)
        return saved

    def _new_entry(self, tensor: torch.Tensor) -> StorageEntry:
        self._count += 1
        entry = StorageEntry(self._count, storage_key(tensor), tensor.untyped_storage().nbytes())
        self._entries[entry.number] = self._by_key[entry.key] = entry
        self._held_by_others[entry] = None
        return entry

    # The way out.

    def _move_out(self) -> None:
        """Send the oldest storages away until the others fit the budget; wait where more is held than may be."""
        self._find_alone()
        room = self._budget - self._prefetched_bytes()
        while self._staying and self._alone_bytes - self._leaving_bytes > room:
            self._send(next(iter(self._staying)))
        while self._leaving and self._alone_bytes > room:
            first = next(iter(self._leaving))
            with self.figures.waiting():
                first.outward.copying.wait()
            self._finish_leaving(first)
        self.figures.peak_bytes = max(self.figures.peak_bytes, self._alone_bytes + self._prefetched_bytes())

    def _prefetched_bytes(self) -> int:
        """Return the bytes of storages that were prefetched, as long as anybody holds them."""
        self._prefetched = [(storage, size) for storage, size in self._prefetched if not storage.expired()]
        return sum(size for _, size in self._prefetched)

    def _find_alone(self) -> None:
        for entry in [entry for entry in self._held_by_others if entry.find_alone()]:
            del self._held_by_others[entry]
            self._alone_bytes += entry.size
            self._kept_bytes += entry.size
            if not entry.used:
                self._staying[entry] = None
        self._step_peak = max(self._step_peak, self._kept_bytes)

    def _send(self, entry: StorageEntry) -> None:
        flat_P = entry.whole()
        entry.sent = self._mover.send(flat_P)
        entry.flat_P, entry.state = flat_P, State.LEAVING
        del self._staying[entry]
        self._leaving[entry] = None
        self._leaving_bytes += entry.size
        self.figures.bytes_out += entry.size

    def _finish_leaving(self, entry: StorageEntry) -> None:
        """Forget the bytes in memory, whose copy has ended. Raises the copy's error; the bytes are then still here."""
        entry.outward.copying.wait()
        self._no_longer_leaving(entry)
        self._out_of_memory(entry)
        entry.state = State.AWAY
        for saved in entry.saved():
            saved.leave()

    def _no_longer_leaving(self, entry: StorageEntry) -> None:
        del self._leaving[entry]
        self._leaving_bytes -= entry.size
        entry.flat_P = None

    def _out_of_memory(self, entry: StorageEntry) -> None:
        self._alone_bytes -= entry.size if entry.alone else 0
        del self._by_key[entry.key]

    # The way back.

    def _use(self, entry: StorageEntry, saved: Saved) -> torch.Tensor:
        self._in_backward = True
        if entry.state is State.LEAVING:
            self._recall(entry)
        entry.used += 1
        if entry.state is State.RESIDENT:
            self._staying.pop(entry, None)
            assert saved.alias is not None, "the bytes are in memory"
            return saved.alias
        return self._returned(entry, saved)

    def _recall(self, entry: StorageEntry) -> None:
        """Keep a storage that is wanted before it has left."""
        self._mover.drop(entry.outward)
        self._no_longer_leaving(entry)
        entry.sent, entry.state = None, State.RESIDENT

    def _returned(self, entry: StorageEntry, saved: Saved) -> torch.Tensor:
        if entry.brought is None:
            self.figures.demanded += 1
            self._bring(entry)
        else:
            self.figures.expected += 1
        with self.figures.waiting():
            entry.inward.copying.wait()
        version = entry.version()
        if version:
            raise overwritten(str(saved.view.dtype), saved.view.shape, saved.version + version, saved.version)
        tensor = saved.view.over(entry.inward.flat_P)
        if entry.used >= entry.wanted:  # autograd holds it now; another pass over the graph brings it again
            entry.brought, entry.used, entry.state = None, 0, State.AWAY
        return tensor

    def _bring(self, entry: StorageEntry) -> torch.Tensor:
        """Begin to copy a storage back; return its bytes."""
        entry.brought = self._mover.bring(entry.outward, entry.size)
        flat_P = entry.brought.flat_P
        entry.watch(flat_P)
        entry.wanted, entry.state = entry.live, State.RETURNING
        self.figures.bytes_in += entry.size
        return flat_P

    def _prefetch_before(self, entry: StorageEntry) -> None:
        """Begin to bring back what was saved right before `entry`, as far as the budget has room."""
        for number in range(entry.number - 1, max(0, entry.number - 1 - _AHEAD), -1):
            before = self._entries.get(number)
            if before is None or before.used:
                continue
            if before.state is State.LEAVING:
                self._recall(before)
            if before.state is State.AWAY:
                if self._alone_bytes + self._prefetched_bytes() + before.size > self._budget:
                    return
                storage = self._bring(before).untyped_storage()
                self._prefetched.append((StorageWeakRef(storage), storage.nbytes()))

    # The end.

    def _settle(self) -> None:
        """Take note of views that are gone and copies that have ended."""
        self._forget_dropped()
        while self._leaving and (first := next(iter(self._leaving))).outward.copying.done():
            self._finish_leaving(first)
        if self._left and not self._entries:
            self.close()

    def _forget_dropped(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._forget(self._dropped.get_nowait())

    def _forget(self, number: int) -> None:
        entry = self._entries[number]
        entry.live -= 1
        if entry.live == 0:
            self._free(entry)

    def _free(self, entry: StorageEntry) -> None:
        del self._entries[entry.number]
        self._kept_bytes -= entry.size if entry.alone else 0
        if entry.state is State.LEAVING:
            self._recall(entry)
        if entry.state is State.RESIDENT:
            self._out_of_memory(entry)
            self._held_by_others.pop(entry, None)
            self._staying.pop(entry, None)
        if entry.brought is not None:
            entry.brought.copying.stop()
            entry.brought = None
        if entry.sent is not None:
            self._mover.drop(entry.sent)

    def _await_the_last(self) -> None:
        """Give all back after the context, in a thread of its own: the last view may be dropped where nothing may be
        waited for."""
        self._over.wait()
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                number = self._dropped.get(timeout=_LOOK_SECONDS)
                with self._lock:
                    self._forget(number)
            with self._lock:
                if not self._entries:
                    self.close()
