"""Somebody's module, of which parts are computed once more in the backward pass, as far as a budget demands.

A part is a block of a few layers, with its inputs and outputs. In the first step all parts are computed once more. Then
it is known what each keeps and how long it takes, and those that take longest for a byte keep what they keep, as many
as the budget has room for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.memory.offload import LEAST, Mover, Offload
from tiledseg.memory.second_run import run_part, within

MOST_LAYERS = 12
"""Modules without parts in one that is run once more: what lies between them is there at once in the backward pass."""


@dataclass(eq=False)
class ModulePart:
    """A part of a module that runs by itself: `module`, called by `forward`. `name` is for the user.

    `bytes`: most that it keeps in a step; `in_step`: in this step so far; `seconds`: the least of a run. `stays`: it
    keeps them.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    bytes: int = 0
    in_step: int = 0
    seconds: float = float("inf")
    stays: bool = False


Place = tuple[nn.Module, list[ModulePart | nn.Module]]
"""A module whose forward pass is replaced by these, one after the other. Modules in it are called as they are."""


class Recomputing(Offload):
    """An `Offload` that runs parts of `model` once more before anything leaves. The law is the same."""

    def __init__(
        self, model: nn.Module, mover: Callable[[], Mover], budget: int, limit: int, least: int = LEAST
    ) -> None:
        """`limit`: bytes beyond which tensors leave; `budget`: those that recomputation aims at."""
        super().__init__(mover, limit, least)
        self.model, self.aim = model, budget
        self._places = find_places(model)
        self._parts = [part for _, calls in self._places for part in calls if isinstance(part, ModulePart)]
        self._without = 0  # most bytes that are held with all parts computed once more
        self._replaced = ExitStack()

    @property
    def again_bytes(self) -> int:
        """Bytes of a step that are not kept, but had from a second run."""
        return sum(max(part.bytes, part.in_step) for part in self._parts if not part.stays)

    def __enter__(self) -> Self:
        super().__enter__()
        if len(self._entered) == 1:
            for module, calls in self._places:
                self._replaced.callback(_put_back, module, module.__dict__.get("forward"))
                module.forward = self._instead(calls)
            self._replaced.callback(self.model.register_forward_pre_hook(self._begin).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if len(self._entered) == 1:
            self._replaced.close()
        super().__exit__(kind, error, at)

    def _instead(self, calls: Sequence[ModulePart | nn.Module]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for call in calls:
                result = self._run(call, args, kwargs) if isinstance(call, ModulePart) else call(*args, **kwargs)
                args, kwargs = (result,), {}
            return args[0]

        return forward

    def _run(self, part: ModulePart, args: Any, kwargs: Any) -> Any:
        if part.stays or within() or not torch.is_grad_enabled() or torch.jit.is_tracing():
            return part.forward(*args, **kwargs)
        begun = time.perf_counter()
        result, freed = run_part(part.name, part.module, part.forward, args, kwargs)
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
        for part in sorted(self._parts, key=lambda part: part.seconds / max(1, part.bytes), reverse=True):
            part.stays = True
            part.stays = part.bytes + self._largest() <= room
            room -= part.bytes * part.stays

    def _largest(self) -> int:
        """Return the bytes that the second run of a part brings back at once."""
        return max((part.bytes for part in self._parts if not part.stays), default=0)


def _put_back(module: nn.Module, own: Any) -> None:
    """Undo the replacement of a module's forward pass; `own`: the attribute that it had besides its class's."""
    del module.forward
    if own is not None:
        module.forward = own


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def find_places(model: nn.Module) -> list[Place]:
    """Return the places of parts of at most `MOST_LAYERS` layers. Raises ConfigError where the module cannot run again,
    or has no such parts."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction) or hasattr(module, "_orig_mod"):
            kind = "compiled" if hasattr(module, "_orig_mod") else "a module of torch.jit"
            raise ConfigError(
                f"model is {type(model).__name__}, of which {name or 'all'} is {kind}: its layers cannot be run by "
                "themselves; give the module that it was made of, or leave model out"
            )
    places = list({id(place[0]): place for place in _places(model, type(model).__name__, True)}.values())
    if not places:
        raise ConfigError(
            f"model is {type(model).__name__}, which has no parts of several layers to run once more; leave model out"
        )
    return places


def _places(module: nn.Module, name: str, is_root: bool = False) -> Iterator[Place]:
    few = not isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_root and 2 <= _layers(module) <= MOST_LAYERS
    if few and not any(map(_is_watched, module.children())):
        yield module, [ModulePart(name, module, module.forward)]
        return
    runs = _runs(module) if type(module).forward is nn.Sequential.forward else []
    if any(len(run) > 1 for run in runs):
        yield module, [_joined(f"a part of {name}", run) if len(run) > 1 else run[0] for run in runs]
    together = {id(child) for run in runs if len(run) > 1 for child in run}
    for child_name, child in module.named_children():
        if id(child) not in together:
            yield from _places(child, f"{name}.{child_name}")


def _layers(module: nn.Module) -> int:
    """Count the modules without parts in it; one that has none counts as one."""
    return sum(1 for part in module.modules() if not any(True for _ in part.children()))


def _runs(sequence: nn.Module) -> list[list[nn.Module]]:
    """Return its modules in turn, one that stands there twice twice: as many as are few layers together; larger ones,
    and those that are watched, alone."""
    runs: list[list[nn.Module]] = [[]]
    for child in filter(None, sequence._modules.values()):
        alone = _layers(child) > MOST_LAYERS or _is_watched(child)
        if alone or sum(map(_layers, runs[-1])) + _layers(child) > MOST_LAYERS:
            runs.append([])
        runs[-1].append(child)
        if alone:
            runs.append([])
    return [run for run in runs if run]


def _is_watched(module: nn.Module) -> bool:
    """Return True if a hook sees the results of a layer in it: it would see them twice."""
    return any(part._forward_hooks or part._backward_hooks for part in module.modules())


def _joined(name: str, run: Sequence[nn.Module]) -> ModulePart:
    """Return the modules one after the other as a part."""
    together = nn.Sequential(*run)
    return ModulePart(name, together, together.forward)
