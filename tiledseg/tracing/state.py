"""The state of a module from call to call: buffers, attributes, hooks, submodules."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import _SimpleCData
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from queue import Queue
from threading import local
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiledseg.errors import ConfigError

REGISTERED = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"  # of a module
HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # of a tensor
GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch(r"_global_\w+_hooks", name)]
DEPTH = 5  # levels of attributes of attributes in a snapshot
# Types of a file's globals in which a function may keep state.
STATE_TYPES = (int, float, Collection, SimpleNamespace, Iterator, _lru_cache_wrapper, memoryview, ContextVar)
STATE_TYPES += (_SimpleCData, torch.Tensor, partial, Queue, local)  # type: ignore[assignment]
LIBRARIES = {"torch", "numpy", "builtins", "tiledseg", *sys.stdlib_module_names}  # packages with no state of authors
SIMPLE = (int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class _Growing(dict[Any, Any]):
    """A snapshot of a mapping that may gain entries but not change them: a cache, environment variables."""


@dataclass
class Changes:
    """The changes that a call of a module makes: names of attributes, of attributes that keep tensors, and buffers."""

    attributes: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)  # changed attributes that hold hooks, or are True now
    kept: list[str] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def kept_state(root: nn.Module, look: bool = True) -> Iterator[Changes]:
    """Restore attributes and buffers of `root` on leaving. `look`: list their changes."""
    changes = Changes()
    modules = list[tuple[str, nn.Module, dict[str, Any], dict[str, tuple[Any, Any]]]]()
    for path, module in root.named_modules():
        pairs = ((name, value, isinstance(value, dict | list | set)) for name, value in vars(module).items())
        before = {name: (value, value.copy() if holds else None) for name, value, holds in pairs}
        modules.append((path, module, _attributes(module) if look else {}, before))
    buffers = [(name, buffer, buffer.clone()) for name, buffer in root.named_buffers()]
    environment = _Growing(os.environ)
    try:
        yield changes
    finally:
        changes.attributes += [] if is_same(environment, _Growing(os.environ)) else ["os.environ"]
        for path, module, old, before in modules:
            now = _attributes(module) if look else {}
            for name in [name for name in {**now, **old} if not is_same(now.get(name), old.get(name))]:
                leaves = tree_leaves(vars(module).get(name))
                are_results = (isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter) for each in leaves)
                changes.marks += [name] if name in FORWARD_HOOKS or now.get(name) is True else []
                names = changes.kept if leaves and all(are_results) else changes.attributes
                names.append(f"{path}.{name}".lstrip("."))
            vars(module).clear()
            vars(module).update({name: value for name, (value, _) in before.items()})
            for value, inside in before.values():
                if inside is not None:
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(inside)
        with torch.no_grad():
            for name, buffer, value in buffers:
                new, was = ((each.isnan(), each.nan_to_num()) for each in (buffer, value))
                if not all(map(torch.equal, new, was)):
                    changes.buffers[name] = buffer
                    buffer.copy_(value)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set a module to training or evaluation; on leaving, restore the mode of each part."""
    modes = [(each, each.training) for each in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for each, before in modes:
            each.training = before


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed the common generators of torch, Python and NumPy; restore them on leaving."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return snapshots of a module's attributes, and of its registered tensors and modules, by name."""
    held = (value if name in REGISTERED else {name: value} for name, value in vars(module).items())
    return {key: _snapshot(value, DEPTH) for each in held for key, value in each.items()}


def is_same(old: Any, new: Any) -> bool:
    """Return True if two snapshots are of the same state."""
    if isinstance(old, _Growing) and isinstance(new, _Growing):
        return all(is_same(old[key], new[key]) for key in old.keys() & new.keys())
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(is_same(old[key], new[key]) for key in old)
    if isinstance(old, list | tuple) and type(new) is type(old):
        return len(old) == len(new) and all(map(is_same, old, new))
    return old is new or (type(old) is type(new) and isinstance(old, SIMPLE) and old == new)


def own_gradients(root: nn.Module) -> str | None:
    """Return the first hook that runs in a backward pass of `root`; None where there is none."""
    if nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks:
        return "all modules have a hook of their backward pass (register_module_full_backward_hook)"
    modules = [path for path, m in root.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    hooked = [f"'{path or 'the module itself'}'" for path in modules]
    hooked += [f"'{name}'" for name, p in root.named_parameters() if any(getattr(p, each, None) for each in HOOKS)]
    return f"{hooked[0]} has a hook of its backward pass, which each rank would run on its part" if hooked else None


class ModuleState:
    """The state of the module that a graph was traced from. `kept`: attributes that its forward sets."""

    def __init__(self, module: nn.Module, kept: Collection[str]) -> None:
        self._module, self._kept = module, kept
        self.renew()

    def renew(self) -> None:
        """Note the module's state as it is now."""
        self._description: dict[str, Any] | None = _description(self._module, self._kept)

    def check(self) -> None:
        """Raise ConfigError that names the part whose attributes, hooks, weights or submodules have changed since."""
        if self._description is None:
            return
        now = _description(self._module, self._kept)
        for path in {**self._description, **now}:
            if not is_same(self._description.get(path), now.get(path)):
                what = f"'{path or 'the module itself'}' has changed since the module was traced"
                raise ConfigError(f"{what} (an attribute, a hook, a parameter or a submodule); trace it again")

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies begin with; `check` of a copy does nothing."""
        return {**vars(self), "_description": None}

    def train(self, mode: bool) -> None:
        """Set the module's mode by its author's own `train`, if it has one, such as for frozen parts."""
        if "train" in vars(self._module) or type(self._module).train is not nn.Module.train:
            self._module.train(mode)


def _description(root: nn.Module, kept: Collection[str]) -> dict[str, Any]:
    """Return snapshots of all of `root` that a trace depends on: modules, weights, hooks, attributes except those named
    in `kept`, and the code of classes."""
    snapshots: dict[str, Any] = {}
    for path, module in root.named_modules():
        attributes = {k: v for k, v in _attributes(module).items() if f"{path}.{k}".lstrip(".") not in kept}
        attributes |= dict.fromkeys(("training", "own_mode", *module._buffers))
        hooks = [_snapshot(getattr(weight, each, None), 1) for weight in module._parameters.values() for each in HOOKS]
        snapshots[path] = [module, attributes, hooks]
    snapshots["torch"] = [_snapshot(vars(nn.modules.module)[name], 2) for name in GLOBAL_HOOKS]
    return snapshots | {"a class of it": class_state(root)}


def class_state(root: nn.Module) -> dict[Any, Any]:
    """Return snapshots of the classes of all parts, and of functions and classes that their code names."""
    snapshots = dict[Any, Any]()
    todo = [each for module in root.modules() for each in (*type(module).__mro__, *vars(module).values())]
    todo += [each for m in root.modules() for hooks in FORWARD_HOOKS for each in vars(m)[hooks].values()]
    while todo:
        each = todo.pop()
        if not isinstance(each, type | FunctionType) or each in snapshots or not _is_own(each):
            continue
        held = {k: v for k, v in vars(each).items() if k != "__init__"} if isinstance(each, type) else {"": each}
        snapshots[each] = [_snapshot(part, DEPTH) for part in held.values()], list(held)
        parts = [getattr(part, "__func__", getattr(part, "fget", part)) for part in held.values()]
        todo += [each for part in parts if isinstance(part, FunctionType) for each in _named(part)]
    return snapshots


def _is_own(kind: Any) -> bool:
    """Return True for a class or function of an author: of no package in LIBRARIES."""
    return str(kind.__module__).partition(".")[0] not in LIBRARIES


def _named(function: FunctionType) -> list[Any]:
    """Return the objects that a function's code names: in its closure, its file, and modules among these."""
    names = function.__code__.co_names
    named = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    named += [function.__globals__.get(name) for name in names]
    return named + [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in names]


def _snapshot(value: Any, depth: int) -> Any:
    """Return a snapshot for `is_same`: copies, `depth` levels deep, of containers, objects' attributes, generators'
    states, and the state that a function names; any other value itself."""
    match value:
        case torch.Tensor() if depth and vars(value):
            return [value, _snapshot(vars(value), depth - 1)]
        case None | int() | float() | str() | bytes() | range() | torch.Tensor() | nn.Module() | type() | ModuleType():
            return value
        case dict() | Mapping() if depth:
            return {key: _snapshot(each, depth - 1) for key, each in value.items()}
        case FunctionType() if depth:
            named = _named(value)
            here = [each for each in named if isinstance(each, STATE_TYPES) or _is_own(type(each))]
            if "cache_info" in value.__code__.co_names:
                here += [each.cache_info() for each in named if isinstance(each, _lru_cache_wrapper)]
            return [value, *(_snapshot(each, depth - 1) for each in (*here, value.__defaults__, vars(value)))]
        case _lru_cache_wrapper() if depth:  # its referents: results, a table of more, then the wrapped function
            parts = gc.get_referents(value)
            at = next(k for k, part in enumerate(parts) if part is value.__wrapped__) - 1
            results = [*parts[:at], *parts[at].values()]
            return [value, _Growing({id(each): [each, _snapshot(each, depth - 1)] for each in results})]
        case partial():
            return _snapshot([value.func, value.args, value.keywords], depth)
        case np.ndarray():
            return value.shape, value.tobytes()
        case bytearray() | memoryview() | array() | _SimpleCData():
            return bytes(value)
        case Collection() if depth:
            return [_snapshot(each, depth - 1) for each in (*value, getattr(value, "__dict__", None))]
        case ContextVar():
            return _snapshot(value.get(None), depth)
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case random.Random() | np.random.Generator() | np.random.RandomState():
            return pickle.dumps(value)
        case Iterator():
            return object()  # never the same: an iterator does not show whether it has moved
    if not depth:
        return value
    slots = [getattr(value, name, None) for name in getattr(value, "__slots__", None) or () if name != "__dict__"]
    return [value, *(_snapshot(each, depth - 1) for each in (getattr(value, "__dict__", None), *slots))]


def generators() -> dict[str, Any]:
    """Return the states of the common generators of random numbers."""
    kind, keys, *rest = np.random.get_state()
    states = torch.random.get_rng_state().tolist()
    return {"torch": states, "Python": random.getstate(), "NumPy": (kind, tuple(keys), *rest)}
