"""A context in which what autograd keeps leaves memory as far as a budget demands: the hooks, from enter to exit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from tiledseg.memory.exhausted import exhausted, is_exhausted
from tiledseg.memory.figures import Figures
from tiledseg.memory.known_steps import KnownSteps
from tiledseg.memory.ledger import Ledger
from tiledseg.memory.mover import Mover

LEAST = 1 << 20
"""Bytes below which a storage stays: moving it would cost more than it frees."""


class Offload:
    """May be entered again, and within itself. What it has learned of the steps stays; file, threads and memory are
    those of one `with` block, and of the graphs made in it: they are given back with the last of these.

    The law: outputs and gradients are the same, bit for bit. `budget`: bytes that autograd alone may hold in memory.
    Memory that runs out in the block is a MemoryLimitError, which says what would fit.
    """

    def __init__(
        self, mover: Callable[[], Mover], budget: int, least: int = LEAST, told: bool = False, all_kept: bool = True
    ) -> None:
        """`told`: steps whose forward and backward passes take turns end where `end_step` says so. `all_kept`: it takes
        all that autograd keeps; else what is handed to `pack` alone."""
        self.budget = budget
        self._told, self._all_kept = told, all_kept
        self.figures = Figures()
        self._mover, self._least = mover, least
        self._known = KnownSteps(budget)
        self._entered: list[tuple[Ledger, ExitStack]] = []

    def __enter__(self) -> Self:
        ledger = Ledger(self._mover(), self._known, self.budget, self._least, self.figures, self._told)
        hooks = ExitStack()
        if self._all_kept:
            hooks.enter_context(saved_tensors_hooks(ledger.pack, ledger.unpack))
        self._entered.append((ledger, hooks))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ledger, hooks = self._entered.pop()
        hooks.__exit__(kind, error, at)
        held = ledger.resident_bytes
        ledger.leave()
        if error is not None and is_exhausted(error):
            raise exhausted(error, held, self.budget) from error

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What gives a tensor back, which may leave meanwhile, in the innermost block. Raises as the ledger does."""
        ledger = self._entered[-1][0]
        saved = ledger.pack(tensor)
        return lambda: ledger.unpack(saved)

    def passed(self) -> None:
        """Somebody may hold no longer what was handed to `pack`: that it leaves, if it is to."""
        self._entered[-1][0].look()

    def end_step(self) -> None:
        """The optimizer has moved, and another step begins."""
        self._entered[-1][0].end_step()

    def counted(self) -> Figures:
        """The figures up to now, also of what a device has waited while the host went on."""
        for ledger, _ in self._entered:
            ledger.count_stalls()
        return self.figures

    @property
    def resident_bytes(self) -> int:
        """What autograd alone holds in memory of what was saved in the innermost block."""
        return self._entered[-1][0].resident_bytes if self._entered else 0
