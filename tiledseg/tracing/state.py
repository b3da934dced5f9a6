"""What a module keeps from call to call: buffers, attributes, hooks, submodules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiledseg.errors import ConfigError

REGISTERED = ("_parameters", "_buffers", "_modules")
SIMPLE = (int, float, str, tuple, type(None), torch.dtype, torch.device)


@dataclass
class Changes:
    """Changes that a call of a module has made: attributes by name, and buffers whose values moved."""

    attributes: list[str] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def kept_state(root: nn.Module) -> Iterator[Changes]:
    """List what changes in `root` while this is entered, and set it back."""
    changes = Changes()
    modules = [(path, module, _snapshot(module)) for path, module in root.named_modules()]
    buffers = [(name, buffer, buffer.clone()) for name, buffer in root.named_buffers()]
    try:
        yield changes
    finally:
        for path, module, before in modules:
            changes.attributes += [f"{path}.{name}".lstrip(".") for name in _restore(module, before)]
        with torch.no_grad():
            for name, buffer, value in buffers:
                if not torch.equal(buffer.nan_to_num(), value.nan_to_num()):
                    changes.buffers[name] = buffer
                buffer.copy_(value)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, containers copied."""
    containers = dict | list | set
    return {name: value.copy() if isinstance(value, containers) else value for name, value in vars(module).items()}


def _restore(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Set back the attributes of a module; return the names of those that had changed, tensors kept aside left out."""
    now, changed = vars(module), []
    for name in [*now.keys() - before.keys(), *before]:
        old: Any = before.get(name)
        new: Any = now.get(name)
        if is_same(old, new):
            continue
        if name in REGISTERED:
            changed += [key for key in old.keys() | new.keys() if old.get(key) is not new.get(key)]
        elif not _holds_tensors(new):
            changed.append(name)
        if name not in before:
            del now[name]
        elif isinstance(new, dict | list | set) and type(new) is type(old):
            new.clear()
            new.extend(old) if isinstance(new, list) else new.update(old)
        else:
            now[name] = old
    return changed


def is_same(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(is_same(old[key], new[key]) for key in old)
    if isinstance(old, list | tuple) and type(new) is type(old):
        return len(old) == len(new) and all(map(is_same, old, new))
    if isinstance(old, set) and isinstance(new, set):
        return old == new
    return old is new or (type(old) is type(new) and isinstance(old, SIMPLE) and old == new)


def _holds_tensors(value: Any) -> bool:
    """Return True for a tensor, or a container of tensors alone: kept to be looked at."""
    if isinstance(value, list | tuple | dict):
        return bool(value) and all(map(_holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def own_gradients(root: nn.Module) -> str | None:
    """Return the first hook that runs in a backward pass of `root`; None where there is none."""
    for path, module in root.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"'{path or 'the module itself'}' has a hook of its backward pass"
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter '{name}' has a hook, which each rank would run on its part of the gradient"
    return None


class Origin:
    """The module that a graph was traced from, as it was then."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.renew()

    def renew(self) -> None:
        """Take the module as it is now."""
        self._description = _description(self._module)

    def check(self) -> None:
        """Raise ConfigError, by name, where the module has other attributes, hooks, weights or submodules since."""
        now = _description(self._module)
        for path in {**self._description, **now}:
            if not is_same(self._description.get(path), now.get(path)):
                raise ConfigError(
                    f"'{path or 'the module itself'}' has changed since the module was traced (an attribute, a hook, a "
                    "parameter or a submodule), and the graph is of before; trace it again"
                )

    def train(self, mode: bool) -> None:
        """Set the module's mode as its author wrote it, such as with frozen parts."""
        if "train" in vars(self._module) or type(self._module).train is not nn.Module.train:
            self._module.train(mode)


def _description(root: nn.Module) -> dict[str, Any]:
    """Return what a trace has taken of `root`, for `is_same`: modules, parameters, hooks, attributes of plain kinds."""
    found: dict[str, Any] = {}
    for path, module in root.named_modules():
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, SIMPLE)}
        kept = {name: value for name, value in vars(module).items() if name.endswith("_hooks")}
        hooks = {name: len(value) for name, value in kept.items() if isinstance(value, dict)}
        own = getattr(module.forward, "__func__", module.forward)
        found[path] = [module, own, dict(module._parameters), attributes | {"training": None}, hooks]
    return found
