"""The parts of somebody's module that are run once more: blocks of a few layers, each with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tiledseg.errors import ConfigError

MOST_LAYERS = 12
"""Modules without parts in one that is run once more: what lies between them is there at once in the backward pass."""

_LISTS = nn.ModuleList, nn.ModuleDict


@dataclass(eq=False)
class ModulePart:
    """A part of a module that runs by itself: `modules`, called by `forward`. `name` is for the user.

    `bytes`: most that it keeps in a step; `in_step`: in this step so far; `seconds`: the least of a run. `stays`: it
    keeps them.
    """

    name: str
    modules: tuple[nn.Module, ...]
    forward: Callable[..., Any]
    bytes: int = 0
    in_step: int = 0
    seconds: float = float("inf")
    stays: bool = False


class PartPlace(NamedTuple):
    """A module of somebody's whose forward pass is replaced: one part, or with `in_turn` a sequence of several, each
    of one module or more."""

    module: nn.Module
    parts: tuple[ModulePart, ...]
    in_turn: bool = False


def find_places(model: nn.Module) -> list[PartPlace]:
    """Return the places of parts of at most `MOST_LAYERS` layers. Raises ConfigError where the module cannot run again,
    or has no such parts."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; give a torch.nn.Module, or leave model out")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction) or hasattr(module, "_orig_mod"):
            kind = "compiled" if hasattr(module, "_orig_mod") else "a module of torch.jit"
            raise ConfigError(
                f"model is {type(model).__name__}, of which {name or 'all'} is {kind}: its layers cannot be run by "
                "themselves; give the module that it was made of, or leave model out"
            )
    places = list({id(place.module): place for place in _places(model, type(model).__name__, True)}.values())
    if not places:
        raise ConfigError(
            f"model is {type(model).__name__}, which has no parts of several layers to run once more; leave model out"
        )
    return places


def _places(module: nn.Module, name: str, is_root: bool = False) -> Iterator[PartPlace]:
    few = not isinstance(module, _LISTS) and not is_root and 2 <= _layers(module) <= MOST_LAYERS
    if few and not any(map(_is_watched, module.children())):
        yield PartPlace(module, (ModulePart(name, (module,), module.forward),))
        return
    runs = tuple(_runs(module)) if type(module).forward is nn.Sequential.forward else ()
    if any(len(run) > 1 for run in runs):
        yield PartPlace(module, tuple(ModulePart(f"a part of {name}", run, _in_turn(run)) for run in runs), True)
    together = {id(child) for run in runs if len(run) > 1 for child in run}
    for child_name, child in module.named_children():
        if id(child) not in together:
            yield from _places(child, f"{name}.{child_name}")


def _layers(module: nn.Module) -> int:
    """Count the modules without parts in it; one that has none counts as one."""
    return sum(1 for part in module.modules() if not any(True for _ in part.children()))


def _runs(sequence: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """Yield its modules in turn, one that stands there twice twice: as many as are few layers together; larger ones
    alone."""
    run: tuple[nn.Module, ...] = ()
    for child in filter(None, sequence._modules.values()):
        alone = _layers(child) > MOST_LAYERS or _is_watched(child)
        if run and (alone or sum(map(_layers, run)) + _layers(child) > MOST_LAYERS):
            yield run
            run = ()
        run = (*run, child)
        if alone:
            yield run
            run = ()
    if run:
        yield run


def _is_watched(module: nn.Module) -> bool:
    """Return True if a hook sees the results of a layer in it: it would see them twice."""
    return any(part._forward_hooks or part._backward_hooks for part in module.modules())


def _in_turn(run: Sequence[nn.Module]) -> Callable[[Any], Any]:
    """Return a call of the modules one after the other. A run of one module is called as it is."""

    def forward(x: Any) -> Any:
        for module in run:
            x = module(x)
        return x

    return forward if len(run) > 1 else run[0]
