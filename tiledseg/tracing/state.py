"""The state of a module from call to call: buffers, attributes, hooks, submodules."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import _SimpleCData
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
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
DEPTH = 5  # of attributes of attributes that are looked at
# What a function may count in, of its module's globals.
HELD = (int, float, str, list, dict, set, deque, np.ndarray, SimpleNamespace, Iterator, _lru_cache_wrapper)
HELD += (bytearray, memoryview, ContextVar, _SimpleCData, torch.Tensor)  # type: ignore[assignment]
OTHERS = {"torch", "numpy", "builtins", "tiledseg", *sys.stdlib_module_names}  # packages with no state of authors
SIMPLE = (int, float, str, bytes, torch.dtype, torch.device, torch.Size)


class _Growing(dict[Any, Any]):
    """Pictures of what may be added to, and not changed: a cache, environment variables."""


@dataclass
class Changes:
    """Changes by a call of a module: attributes by name, those that keep tensors aside, and buffers that moved."""

    attributes: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)  # those of `attributes` that are hooks, or True from now on
    kept: list[str] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def kept_state(root: nn.Module, look: bool = True) -> Iterator[Changes]:
    """Set back what changes in `root` while this is entered. `look`: list the changes."""
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
                leaves = tree_leaves(vars(module).get(name))  # tensors alone are kept to be looked at
                keeps = all(isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter) for each in leaves)
                keeps = keeps and len(leaves) > 0
                changes.marks += [name] if name in FORWARD_HOOKS or now.get(name) is True else []
                (changes.kept if keeps else changes.attributes).append(f"{path}.{name}".lstrip("."))
            for name in vars(module).keys() - before.keys():
                del vars(module)[name]
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
    """Set a module to training or evaluation, and all its parts back."""
    modes = [(each, each.training) for each in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for each, before in modes:
            each.training = before


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed all generators that a constructor draws from by custom, and set them back afterwards."""
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
    """Return pictures of a module's attributes, of registered tensors and modules each by its name."""
    held = (value if name in REGISTERED else {name: value} for name, value in vars(module).items())
    return {key: _picture(value, DEPTH) for each in held for key, value in each.items()}


def is_same(old: Any, new: Any) -> bool:
    """Return True for pictures of a state that has not changed."""
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
    """The module that a graph was traced from, as it was then. `kept`: attributes that its forward sets."""

    def __init__(self, module: nn.Module, kept: Collection[str]) -> None:
        self._module, self._kept = module, kept
        self.renew()

    def renew(self) -> None:
        """Take the module as it is now."""
        self._description: dict[str, Any] | None = _description(self._module, self._kept)

    def check(self) -> None:
        """Raise ConfigError, by name, where the module has other attributes, hooks, weights or submodules since."""
        if self._description is None:
            return
        now = _description(self._module, self._kept)
        for path in {**self._description, **now}:
            if not is_same(self._description.get(path), now.get(path)):
                what = f"'{path or 'the module itself'}' has changed since the module was traced"
                raise ConfigError(f"{what} (an attribute, a hook, a parameter or a submodule); trace it again")

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        """Return the state of a copy, which is compared with nothing."""
        again: ModuleState = object.__new__(ModuleState)
        again._module, again._kept, again._description = copy.deepcopy(self._module, memo), self._kept, None
        return again

    def train(self, mode: bool) -> None:
        """Set the module's mode as its author wrote it, such as with frozen parts."""
        if "train" in vars(self._module) or type(self._module).train is not nn.Module.train:
            self._module.train(mode)


def _description(root: nn.Module, kept: Collection[str]) -> dict[str, Any]:
    """Return pictures of all that a trace has taken of `root`: modules, weights, hooks, attributes but those named in
    `kept`, and the code of their classes."""
    pictures: dict[str, Any] = {}
    for path, module in root.named_modules():
        attributes = {k: v for k, v in _attributes(module).items() if f"{path}.{k}".lstrip(".") not in kept}
        attributes |= dict.fromkeys(("training", *module._buffers))
        hooks = [_picture(getattr(weight, each, None), 1) for weight in module._parameters.values() for each in HOOKS]
        pictures[path] = [module, attributes, hooks]
    pictures["torch"] = [_picture(value, 2) for name, value in vars(nn.modules.module).items() if name in GLOBAL_HOOKS]
    return pictures | {"a class of it": class_state(root)}


def class_state(root: nn.Module) -> dict[Any, Any]:
    """Return pictures of the classes of parts, and of functions and classes that theirs name, in any file."""
    pictures = dict[Any, Any]()
    todo = [each for module in root.modules() for each in (*type(module).__mro__, *vars(module).values())]
    todo += [each for m in root.modules() for hooks in FORWARD_HOOKS for each in vars(m)[hooks].values()]
    while todo:
        each = todo.pop()
        if not isinstance(each, type | FunctionType) or each in pictures or not _is_own(each):
            continue
        held = {k: v for k, v in vars(each).items() if k != "__init__"} if isinstance(each, type) else {"": each}
        pictures[each] = [_picture(part, DEPTH) for part in held.values()], list(held)
        parts = [getattr(part, "__func__", getattr(part, "fget", part)) for part in held.values()]
        todo += [each for part in parts if isinstance(part, FunctionType) for each in _named(part)]
    return pictures


def _is_own(kind: Any) -> bool:
    """Return True for a class or function of neither torch's, nor the standard library's."""
    return str(kind.__module__).partition(".")[0] not in OTHERS


def _named(function: FunctionType) -> list[Any]:
    """Return what a function's code names: of functions around it, of its file, and of modules among these."""
    names = function.__code__.co_names
    named = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    named += [function.__globals__.get(name) for name in names]
    return named + [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in names]


def _picture(value: Any, depth: int) -> Any:
    """Return a copy of containers, of the attributes of objects, and of generators of numbers, for `is_same`; all else
    as it is."""
    match value:
        case torch.Tensor() if depth and vars(value):
            return [value, _picture(vars(value), depth - 1)]
        case None | int() | float() | str() | bytes() | torch.Tensor() | nn.Module() | type() | ModuleType():
            return value
        case dict() | Mapping() if depth:
            return {key: _picture(each, depth - 1) for key, each in value.items()}
        case list() | tuple() | set() | frozenset() | deque() if depth:
            return [_picture(each, depth - 1) for each in value]
        case FunctionType() if depth:
            named = _named(value)
            here = [each for each in named if isinstance(each, HELD) or _is_own(type(each))]
            if "cache_info" in value.__code__.co_names:
                here += [each.cache_info() for each in named if isinstance(each, _lru_cache_wrapper)]
            return [value, *(_picture(each, depth - 1) for each in (*here, value.__defaults__, vars(value)))]
        case _lru_cache_wrapper() if depth:  # results by their places in memory: beside a table, which comes before
            parts = gc.get_referents(value)
            at = next(k for k, part in enumerate(parts) if part is value.__wrapped__) - 1
            results = [*parts[:at], *parts[at].values()]
            return [value, _Growing({id(each): [each, _picture(each, depth - 1)] for each in results})]
        case partial():
            return _picture([value.func, value.args, value.keywords], depth)
        case np.ndarray():
            return value.shape, value.tobytes()
        case bytearray() | memoryview() | _SimpleCData():
            return bytes(value)
        case ContextVar():
            return _picture(value.get(None), depth)
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case random.Random() | np.random.Generator() | np.random.RandomState():
            return pickle.dumps(value)
        case Iterator():
            return object()  # another one each time: nobody can tell whether it has moved
    slots = [getattr(value, name, None) for name in getattr(value, "__slots__", None) or () if name != "__dict__"]
    return (
        [value, *(_picture(each, depth - 1) for each in (getattr(value, "__dict__", None), *slots))] if depth else value
    )


def generators() -> dict[str, Any]:
    """Return the states of the common generators of random numbers."""
    kind, keys, *rest = np.random.get_state()
    states = torch.random.get_rng_state().tolist()
    return {"torch": states, "Python": random.getstate(), "NumPy": (kind, tuple(keys), *rest)}
