"""The parts of somebody's module that are run once more: blocks of a few layers, each with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.memory.rerun.second_run import ModulePart

MOST_LAYERS = 12
"""Modules without parts in one that is run once more: what lies between them is there at once in the backward pass."""

_LISTS = nn.ModuleList, nn.ModuleDict


class PartPlace:
    """A module of somebody's whose forward pass is replaced: that of a part, or of a sequence of parts."""

    def __init__(self, name: str, module: nn.Module, runs: Sequence[Sequence[nn.Module]] | None) -> None:
        self.name, self.module, self.runs = name, module, runs
        self.forward: Any = module.forward
        self.own: Any = None  # the attribute of that name, where the module has one besides its class's

    def parts(self) -> list[ModulePart]:
        if self.runs is None:
            return [ModulePart(self.name, (self.module,), self.forward)]
        return [ModulePart(f"a part of {self.name}", tuple(run), _in_turn(run)) for run in self.runs]


def find_places(model: nn.Module) -> list[PartPlace]:
    """Of parts of at most `MOST_LAYERS` layers. Raises ConfigError where the module is none that can run again, or has
    no such parts."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {type(model).__name__}; give a torch.nn.Module, or leave model out")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction) or hasattr(module, "_orig_mod"):
            kind = "compiled" if hasattr(module, "_orig_mod") else "a module of torch.jit"
            raise ConfigError(
                f"model is {type(model).__name__}, of which {name or 'all'} is {kind}: its layers cannot be run by "
                "themselves; give the module that it was made of, or leave model out"
            )
    found = list({id(place.module): place for place in _places(model, type(model).__name__, True)}.values())
    if not any(place.parts() for place in found):
        raise ConfigError(
            f"model is {type(model).__name__}, which has no parts of several layers to run once more; leave model out"
        )
    return found


def _places(module: nn.Module, name: str, is_root: bool = False) -> Iterator[PartPlace]:
    layers = _layers(module)
    if not isinstance(module, _LISTS) and not is_root and 2 <= layers <= MOST_LAYERS and not _is_watched(module):
        yield PartPlace(name, module, None)
        return
    runs = list(_runs(module)) if type(module).forward is nn.Sequential.forward else []
    if any(len(run) > 1 for run in runs):
        yield PartPlace(name, module, runs)
    together = {id(child) for run in runs if len(run) > 1 for child in run}
    for child_name, child in module.named_children():
        if id(child) not in together:
            yield from _places(child, f"{name}.{child_name}")


def _layers(module: nn.Module) -> int:
    """Modules without parts in it; one that is none counts as one."""
    return sum(1 for part in module.modules() if not any(True for _ in part.children()))


def _runs(sequence: nn.Module) -> Iterator[list[nn.Module]]:
    """Its children in turn: as many as are few layers together; each larger one by itself."""
    run: list[nn.Module] = []
    for child in sequence.children():
        if run and (sum(map(_layers, run)) + _layers(child) > MOST_LAYERS or _is_watched(child, True)):
            yield run
            run = []
        run.append(child)
        if _layers(child) > MOST_LAYERS or _is_watched(child, True):
            yield run
            run = []
    if run:
        yield run


def _is_watched(module: nn.Module, itself: bool = False) -> bool:
    """Whether somebody looks at what layers within it give: he would see it twice."""
    within = module.modules() if itself else (part for part in module.modules() if part is not module)
    return any(part._forward_hooks or part._backward_hooks for part in within)


def _in_turn(run: Sequence[nn.Module]) -> Any:
    def forward(x: Any) -> Any:
        for module in run:
            x = module(x)
        return x

    return forward
