"""Somebody's module, of which parts are computed once more in the backward pass, as far as a budget demands.

In the first step all of them are. Then it is known what each keeps and how long it takes, and those that take longest
for a byte keep what they keep, as many as the budget has room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tiledseg.memory.mover import Mover
from tiledseg.memory.offload import LEAST, Offload
from tiledseg.memory.rerun.parts import PartPlace, find_places
from tiledseg.memory.rerun.second_run import ModulePart, run_part, within
from tiledseg.system.console import say


@dataclass
class _Known:
    """Of a part: bytes that it keeps in a step at most, and seconds of a run; `stays`: it keeps them."""

    bytes: int = 0
    in_step: int = 0
    seconds: float = float("inf")
    stays: bool = False


class Recomputing(Offload):
    """An `Offload` (see there) that runs parts of `model` once more before anything leaves. The law is the same."""

    def __init__(
        self, model: nn.Module, mover: Callable[[], Mover], budget: int, limit: int, least: int = LEAST
    ) -> None:
        """`limit`: bytes beyond which tensors leave; `budget`: those that recomputation aims at."""
        super().__init__(mover, limit, least)
        self.model, self.aim = model, budget
        self._places = find_places(model)
        self._known_parts: list[_Known] = []
        self._without = 0  # most bytes that are held with all parts computed once more
        self._nothing_leaves, self._warned = limit > budget, False

    @property
    def again_bytes(self) -> int:
        """Of a step: what is not kept, but had from a second run."""
        return sum(max(known.bytes, known.in_step) for known in self._known_parts if not known.stays)

    def __enter__(self) -> Self:
        super().__enter__()
        if len(self._entered) == 1:
            self._replace()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if len(self._entered) == 1:
            self._put_back()
        super().__exit__(kind, error, at)

    def _replace(self) -> None:
        known = iter(self._known_parts)
        found: list[_Known] = []
        for place in self._places:
            place.forward = place.module.forward
            runs = [(part, next(known, None) or _Known()) for part in place.parts()]
            found += [each for _, each in runs]
            place.own = place.module.__dict__.get("forward")
            place.module.forward = self._instead(place, runs)
        self._known_parts = found
        self._hook = self.model.register_forward_pre_hook(self._begins)

    def _put_back(self) -> None:
        self._hook.remove()
        for place in self._places:
            del place.module.forward
            if place.own is not None:
                place.module.forward = place.own

    def _instead(self, place: PartPlace, runs: list[tuple[ModulePart, _Known]]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if place.runs is None:
                return self._run(*runs[0], args, kwargs)
            result = args[0] if args else kwargs["input"]
            for part, known in runs:
                result = self._run(part, known, (result,), {}) if len(part.modules) > 1 else part.forward(result)
            return result

        return forward

    def _run(self, part: ModulePart, known: _Known, args: Any, kwargs: Any) -> Any:
        if known.stays or within() or not torch.is_grad_enabled() or torch.jit.is_tracing():
            return part.forward(*args, **kwargs)
        begun = time.perf_counter()
        result, call = run_part(part, args, kwargs)
        if not _in_backward():
            known.seconds = min(known.seconds, time.perf_counter() - begun)
            known.in_step += call.freed
        return result

    def _begins(self, model: nn.Module, args: Any) -> None:
        """A call of the whole model. It begins a step where it is no part of a backward pass, and one has been."""
        if not _in_backward() and self._entered[-1][0].end_step():
            self._choose()

    def _choose(self) -> None:
        held = self._entered[-1][0].last_peak
        for known in self._known_parts:
            known.bytes, known.in_step = max(known.bytes, known.in_step), 0
        self._without = max(self._without, held - sum(known.bytes for known in self._known_parts if known.stays))
        for known in self._known_parts:
            known.stays = False
        room = self.aim - self._without
        if self._without + self._largest() > self.aim:
            self._warn()
        for known in sorted(self._known_parts, key=lambda known: known.seconds / max(1, known.bytes), reverse=True):
            known.stays = True
            if known.bytes + self._largest() > room:
                known.stays = False
            else:
                room -= known.bytes

    def _largest(self) -> int:
        """Bytes that the second run of a part brings back at once."""
        return max((known.bytes for known in self._known_parts if not known.stays), default=0)

    def _warn(self) -> None:
        """Once, and where nothing can leave."""
        if self._nothing_leaves and not self._warned:
            self._warned = True
            say(
                f"warning: with all parts of model computed once more autograd holds {self._without + self._largest()} "
                f"bytes, beyond a budget of {self.aim}; give store a folder on a local disk, or use a smaller batch"
            )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
