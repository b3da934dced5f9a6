"""The book of all storages that autograd keeps: what leaves, when, and that everybody gets the right bytes back.

A storage leaves once autograd alone holds it. Then nobody can change its bytes any more, so that its copy is final: no
view, no user and no operation in place can see or make a difference. What somebody else holds (a weight, a batch, a
skip that the network's own code still names) would free no memory and stays.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque

import torch

from tiledseg.memory.entry import Entry, State
from tiledseg.memory.figures import Figures
from tiledseg.memory.known_steps import KnownSteps
from tiledseg.memory.mover import Brought, Mover
from tiledseg.memory.owners import StorageKey, may_move, storage_key
from tiledseg.memory.plan import Return
from tiledseg.memory.saved import Kept, Saved, overwritten
from tiledseg.memory.timeline import Record, Sign

_LOOK_SECONDS = 0.25


class Ledger:
    """The hooks of one context: `pack` and `unpack`, from any thread. `budget`: bytes that autograd alone may hold in
    memory; `least`: bytes from which on a storage is moved at all; `told`: a step ends where `end_step` says so."""

    def __init__(
        self, mover: Mover, known: KnownSteps, budget: int, least: int, figures: Figures, told: bool = False
    ) -> None:
        self._mover, self._known, self._budget, self._least, self._told = mover, known, budget, least, told
        self.figures = figures
        self._lock = threading.RLock()
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[StorageKey, Entry] = {}
        self._held_by_others: dict[Entry, None] = {}
        self._staying: dict[Entry, None] = {}  # autograd alone holds them; oldest first
        self._leaving: dict[Entry, None] = {}
        self._alone_bytes = self._leaving_bytes = self._window = self._count = 0
        self._closed = self._left = False
        self._over = threading.Event()
        self._begin_step()
        # Begun now: where memory has run out, no thread can be begun.
        threading.Thread(target=self._await_the_last, name="memory-close", daemon=True).start()

    # What autograd calls.

    def pack(self, tensor: torch.Tensor) -> Kept | Saved:
        """Raises WriteError or MemoryLimitError where the store does not take what must leave."""
        with self._lock:
            self._settle()
            saved = self._save(tensor) if self._moves(tensor) else Kept(tensor)
            self._move_out()
            return saved

    def unpack(self, saved: Kept | Saved) -> torch.Tensor:
        """The tensor, bit for bit. Raises RuntimeError where it was written over, WriteError where its bytes cannot be
        read."""
        if isinstance(saved, Kept):
            return saved.tensor()
        with self._lock:
            self._settle()
            saved.check()
            tensor = self._use(self._entries[saved.number], saved)
            self._bring_ahead()
            self._move_out()
            return tensor

    # What the context calls.

    def look(self) -> None:
        """What autograd alone holds by now leaves, if it is to. Raises as `pack`."""
        with self._lock:
            self._settle()
            self._move_out()

    def leave(self) -> None:
        """The context has ended: everything is given back, now, or once the last graph that was made in it is gone."""
        with self._lock:
            self._forget_dropped()
            self._end_step()
            self._left = True
            if not self._entries:
                self.close()
        self._over.set()

    def end_step(self) -> bool:
        """Whether a step was over, which from now on is known; the next one begins."""
        with self._lock:
            over = self._record.in_backward if self._told else self._step_is_over()
            if over:
                self._end_step()
                self._begin_step()
            return over

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._mover.close()
                self.count_stalls()

    def count_stalls(self) -> None:
        """What a device, not the host, has waited for copies so far."""
        with self._lock:
            self.figures.waited_seconds += self._mover.stood_still()

    @property
    def resident_bytes(self) -> int:
        """What autograd alone holds in memory."""
        return self._alone_bytes

    # Steps.

    def _begin_step(self) -> None:
        self._record = Record()
        self._of_step: dict[int, Entry] = {}
        self._returns: deque[Return] | None = None
        self._known.begin()
        plan = self._known.plan
        self._window = max(self._window, plan.window if plan else 0)
        self._mover.prepare(self._window)

    def _end_step(self) -> None:
        if self._record.in_backward:
            self.figures.steps += 1
            self.figures.known_steps += self._known.plan is not None
            self._known.learn(self._record)

    def _step_is_over(self) -> bool:
        """A save that is no part of a backward pass begins a step, after a use or where nothing is left of the last;
        none does where one is told."""
        if self._told or torch._C._current_graph_task_id() != -1:
            return False
        return self._record.in_backward or (self._record.clock > 0 and not self._entries)

    # Saves.

    def _moves(self, tensor: torch.Tensor) -> bool:
        return may_move(tensor, self._least) and self._mover.takes(tensor)

    def _save(self, tensor: torch.Tensor) -> Saved:
        if self._step_is_over():
            self._end_step()
            self._begin_step()
        entry = self._by_key.get(storage_key(tensor)) or self._new_entry(tensor)
        saved = Saved(tensor, entry.number, self._dropped.put)
        entry.add(saved)
        ordinal = entry.ordinal if entry.record is self._record else -1
        view = saved.view
        sign = Sign(ordinal, entry.size, view.shape, view.stride, view.offset, str(view.dtype))
        self._known.saw(len(self._record.signs), sign)
        self._record.save(sign)
        return saved

    def _new_entry(self, tensor: torch.Tensor) -> Entry:
        size, key = tensor.untyped_storage().nbytes(), storage_key(tensor)
        self._count += 1
        entry = Entry(self._count, key, size, self._record, self._record.add_storage(size))
        self._entries[entry.number] = self._by_key[key] = self._of_step[entry.ordinal] = entry
        self._held_by_others[entry] = None
        return entry

    # The way out.

    def _move_out(self) -> None:
        """Let go what is to leave; stand still where more is held than may be, until enough has left."""
        self._find_alone()
        limit = self._budget - self._window - self._mover.beside
        while self._staying and self._alone_bytes - self._leaving_bytes > limit:
            self._send(next(iter(self._staying)))
        while self._leaving and self._alone_bytes > limit:
            first = next(iter(self._leaving))
            with self.figures.waiting():
                first.outward.copying.wait()
            self._finish_leaving(first)
        self.figures.peak_bytes = max(self.figures.peak_bytes, self._held())

    def _held(self) -> int:
        return self._alone_bytes + self._window + self._mover.beside

    def _find_alone(self) -> None:
        plan = self._known.plan
        for entry in [entry for entry in self._held_by_others if entry.find_alone()]:
            del self._held_by_others[entry]
            if entry.record is self._record:
                self._record.alone(entry.ordinal)
            self._alone_bytes += entry.size
            if not entry.used:
                self._staying[entry] = None
                if plan and entry.record is self._record and entry.ordinal in plan.leaving:
                    self._send(entry)

    def _send(self, entry: Entry) -> None:
        flat_P = entry.whole()
        entry.sent = self._mover.send(flat_P)
        entry.flat_P, entry.state = flat_P, State.LEAVING
        del self._staying[entry]
        self._leaving[entry] = None
        self._leaving_bytes += entry.size
        self.figures.bytes_out += entry.size

    def _finish_leaving(self, entry: Entry) -> None:
        """Its copy has ended. Raises what that failed with; the bytes are then still here."""
        entry.outward.copying.wait()
        self._no_longer_leaving(entry)
        self._out_of_memory(entry)
        entry.state = State.AWAY
        for saved in entry.saved():
            saved.leave()

    def _no_longer_leaving(self, entry: Entry) -> None:
        del self._leaving[entry]
        self._leaving_bytes -= entry.size
        entry.flat_P = None

    def _out_of_memory(self, entry: Entry) -> None:
        self._alone_bytes -= entry.size if entry.alone else 0
        del self._by_key[entry.key]

    # The way back.

    def _use(self, entry: Entry, saved: Saved) -> torch.Tensor:
        if entry.record is self._record:
            self._note_use(entry)
        if entry.state is State.LEAVING:
            self._recall(entry)
        entry.used += 1
        if entry.state is State.RESIDENT:
            self._staying.pop(entry, None)
            assert saved.alias is not None, "what is in memory is seen"
            return saved.alias
        return self._returned(entry, saved)

    def _note_use(self, entry: Entry) -> None:
        self._record.use(entry.ordinal)
        if self._returns is None:
            plan = self._known.plan
            self._returns = deque(plan.returns if plan else ())

    def _recall(self, entry: Entry) -> None:
        """It is wanted before it has left: it stays."""
        self._mover.drop(entry.outward)
        self._no_longer_leaving(entry)
        entry.sent, entry.state = None, State.RESIDENT

    def _returned(self, entry: Entry, saved: Saved) -> torch.Tensor:
        if entry.brought is None:
            self.figures.demanded += 1
            self._comes(entry, self._mover.bring(entry.outward, entry.size, None))
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

    def _comes(self, entry: Entry, brought: Brought | None) -> bool:
        entry.brought = brought
        if brought is not None:
            entry.watch(brought.flat_P)
            entry.wanted = entry.live
            entry.state = State.RETURNING
            self.figures.bytes_in += entry.size
        return brought is not None

    def _bring_ahead(self) -> None:
        """Begin to read what the plan wants next, as far as there is room."""
        while self._returns:
            storage, offset = self._returns[0]
            entry = self._of_step.get(storage)
            if entry is not None and entry.state is State.LEAVING:
                self._recall(entry)
            if entry is not None and entry.state is State.AWAY and not self._bring_to(entry, offset):
                return
            self._returns.popleft()

    def _bring_to(self, entry: Entry, offset: int | None) -> bool:
        """Into the window, to its place; or, where something lies there yet, beside it, where what has stayed so far
        has left room."""
        if offset is not None and self._comes(entry, self._mover.bring(entry.outward, entry.size, offset)):
            return True
        if self._held() + entry.size <= self._budget:
            return self._comes(entry, self._mover.bring_beside(entry.outward, entry.size))
        return offset is None and entry.size > self._budget - self._window  # it will never have room ahead

    # The end.

    def _settle(self) -> None:
        """Take note of what has happened since: views that are gone, copies that have ended."""
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

    def _free(self, entry: Entry) -> None:
        entry.record.freed(entry.ordinal)
        del self._entries[entry.number]
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
        entry.state = State.FREE

    def _await_the_last(self) -> None:
        """In a thread of its own, after the context: the last view may go at any place, where nothing may be waited
        for."""
        self._over.wait()
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                number = self._dropped.get(timeout=_LOOK_SECONDS)
                with self._lock:
                    self._forget(number)
            with self._lock:
                if not self._entries:
                    self.close()
