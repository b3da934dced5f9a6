"""A context in which what autograd keeps leaves memory as far as a budget demands: the hooks, from enter to exit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from tiledseg.memory.exhausted import exhausted, is_exhausted
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.host import HostMover
from tiledseg.memory.ledger import Ledger
from tiledseg.memory.mover import HOST, Figures, Mover
from tiledseg.system.console import say
from tiledseg.units import size

LEAST = 1 << 20
"""Bytes below which a storage stays: moving it would cost more than it frees."""


class Offload:
    """A context that may be entered again, and within itself.

    File, threads and memory belong to one `with` block and its graphs: the last of these gives them back.

    The law: outputs and gradients are the same, bit for bit. `budget`: bytes that autograd alone may hold in memory.
    Memory that runs out in the block is a MemoryLimitError, which says what would fit. `warns_above`: bytes beyond
    which a line at the end of the block says how many were held, and a remedy.
    """

    warns_above, remedy = sys.maxsize, ""

    def __init__(self, mover: Callable[[], Mover], budget: int, least: int = LEAST, all_kept: bool = True) -> None:
        """`all_kept`: all that autograd keeps may leave; else what is handed to `pack` alone."""
        self.budget = budget
        self.figures = Figures()
        self._mover, self._least, self._all_kept = mover, least, all_kept
        self._entered: list[tuple[Ledger, ExitStack]] = []

    def __enter__(self) -> Self:
        ledger = Ledger(self._mover(), self.budget, self._least, self.figures)
        hooks = ExitStack()
        if self._all_kept:
            hooks.enter_context(saved_tensors_hooks(ledger.pack, ledger.unpack))
        self._entered.append((ledger, hooks))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ledger, hooks = self._entered.pop()
        hooks.__exit__(kind, error, at)
        held = ledger.resident_bytes
        ledger.count_stalls()
        peak = self.figures.peak_bytes
        if error is None and not self._entered and peak > self.warns_above:
            say(f"warning: autograd held {size(peak)}, beyond the budget of {size(self.warns_above)}; {self.remedy}")
        if error is not None and is_exhausted(error):
            raise exhausted(error, held, self.budget) from error

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that gives back a tensor, which may leave meanwhile, in the innermost block. Raises as the
        ledger does."""
        ledger = self._entered[-1][0]
        saved = ledger.pack(tensor)
        return lambda: ledger.unpack(saved)

    def passed(self) -> None:
        """Send away what was handed to `pack` and is no longer held by others, as far as it must leave."""
        self._entered[-1][0].look()

    def end_step(self) -> None:
        """Count a step: the optimizer has moved."""
        self.figures.steps += 1

    def counted(self) -> Figures:
        """Return the figures up to now, with what a device has waited while the host went on."""
        for ledger, _ in self._entered:
            ledger.count_stalls()
        return self.figures


def mover_to(store: str | Path, device: torch.device, limit: int) -> Callable[[], Mover]:
    """Return a function that makes the mover of a store, of at most `limit` bytes outside: a GPU's tensors go to its
    host's memory, a CPU's to a folder. The caller checks that `device` has a way there."""
    if str(store) == HOST:
        return lambda: HostMover(device, limit)
    return lambda: FileStore(store, limit)
