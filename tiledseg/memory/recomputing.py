"""Somebody's module, of which parts are computed once more in the backward pass, as far as a budget demands.

In the first step all of them are. Then it is known what each keeps and how long it takes, and those that take longest
for a byte keep what they keep, as many as the budget has room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tiledseg.memory.offload import LEAST, Mover, Offload
from tiledseg.memory.part_call import run_part, within
from tiledseg.memory.parts import ModulePart, PartPlace, find_places
from tiledseg.system.console import say


class Recomputing(Offload):
    """An `Offload` that runs parts of `model` once more before anything leaves. The law is the same."""

    def __init__(
        self, model: nn.Module, mover: Callable[[], Mover], budget: int, limit: int, least: int = LEAST
    ) -> None:
        """`limit`: bytes beyond which tensors leave; `budget`: those that recomputation aims at."""
        super().__init__(mover, limit, least)
        self.model, self.aim = model, budget
        self._places = find_places(model)
        self._parts = [part for place in self._places for part in place.parts]
        self._without = 0  # most bytes that are held with all parts computed once more
        self._nothing_leaves, self._warned = limit > budget, False
        self._replaced = ExitStack()

    @property
    def again_bytes(self) -> int:
        """Bytes of a step that are not kept, but had from a second run."""
        return sum(max(part.bytes, part.in_step) for part in self._parts if not part.stays)

    def __enter__(self) -> Self:
        super().__enter__()
        if len(self._entered) == 1:
            for place in self._places:
                own = place.module.__dict__.get("forward")
                if not place.in_turn:
                    place.parts[0].forward = place.module.forward
                place.module.forward = self._instead(place)
                self._replaced.callback(_put_back, place.module, own)
            self._replaced.callback(self.model.register_forward_pre_hook(self._begin).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if len(self._entered) == 1:
            self._replaced.close()
        super().__exit__(kind, error, at)

    def _instead(self, place: PartPlace) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not place.in_turn:
                return self._run(place.parts[0], args, kwargs)
            result = args[0] if args else kwargs["input"]
            for part in place.parts:
                result = self._run(part, (result,), {}) if len(part.modules) > 1 else part.forward(result)
            return result

        return forward

    def _run(self, part: ModulePart, args: Any, kwargs: Any) -> Any:
        if part.stays or within() or not torch.is_grad_enabled() or torch.jit.is_tracing():
            return part.forward(*args, **kwargs)
        begun = time.perf_counter()
        result, freed = run_part(part, args, kwargs)
        if not _in_backward():
            part.seconds = min(part.seconds, time.perf_counter() - begun)
            part.in_step += freed
        return result

    def _begin(self, model: nn.Module, args: Any) -> None:
        """Begin a step at a call of the whole model which is no part of a backward pass, where one has been."""
        held = None if _in_backward() else self._entered[-1][0].end_step()
        if held is not None:
            self._choose(held)

    def _choose(self, held: int) -> None:
        """Choose the parts that stay, after a step in which autograd alone held at most `held` bytes."""
        for part in self._parts:
            part.bytes, part.in_step = max(part.bytes, part.in_step), 0
        self._without = max(self._without, held - sum(part.bytes for part in self._parts if part.stays))
        for part in self._parts:
            part.stays = False
        room = self.aim - self._without
        if self._largest() > room:
            self._warn()
        for part in sorted(self._parts, key=lambda part: part.seconds / max(1, part.bytes), reverse=True):
            part.stays = True
            if part.bytes + self._largest() > room:
                part.stays = False
            else:
                room -= part.bytes

    def _largest(self) -> int:
        """Return the bytes that the second run of a part brings back at once."""
        return max((part.bytes for part in self._parts if not part.stays), default=0)

    def _warn(self) -> None:
        """Warn once, and where nothing can leave."""
        if self._nothing_leaves and not self._warned:
            self._warned = True
            say(
                f"warning: with all parts of model computed once more autograd holds {self._without + self._largest()} "
                f"bytes, beyond a budget of {self.aim}; give store a folder on a local disk, or use a smaller batch"
            )


def _put_back(module: nn.Module, own: Any) -> None:
    """Undo the replacement of a module's forward pass; `own`: the attribute that it had besides its class's."""
    del module.forward
    if own is not None:
        module.forward = own


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
