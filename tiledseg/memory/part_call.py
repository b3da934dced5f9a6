"""One call of a part of somebody's module, nothing of which stays for the backward pass but its inputs.

The second run takes the same inputs, in the state that the module and the generators of random numbers had: the same
bits, and nothing changes twice. A call that writes over its inputs, which could not run again, keeps what it saves.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from tiledseg.memory.parts import ModulePart
from tiledseg.memory.saved import KeptTensor, hooks_around, storage_key
from tiledseg.memory.second_run import SavedHandle, SecondRun

_SMALL = 1 << 20  # bytes of a buffer that is copied; a larger one must not change
_HERE = threading.local()


def within() -> bool:
    """Return True while a call of a part runs in this thread: parts within it run as they are."""
    return getattr(_HERE, "within", False)


@contextmanager
def _alone() -> Iterator[None]:
    before = within()
    _HERE.within = True
    try:
        yield
    finally:
        _HERE.within = before


def run_part(part: ModulePart, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Return the part's result, and the bytes that it would have kept for the backward pass."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    versions, around = [tensor._version for tensor in tensors], hooks_around()
    kept = [(KeptTensor(x, around), x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    state = _PartState(part.modules, tensors)

    def again() -> None:
        inputs = [x[0].get().detach().requires_grad_(x[1]) if _is_kept(x) else x for x in kept]
        own_args, own_kwargs = tree_unflatten(inputs, form)
        with state.restored(), _alone():
            part.forward(*own_args, **own_kwargs)

    weights = (tensor for module in part.modules for tensor in (*module.parameters(), *module.buffers()))
    steady = {storage_key(tensor) for tensor in (*tensors, *weights)}
    handles: list[SavedHandle] = []

    def pack(tensor: torch.Tensor) -> SavedHandle:
        handles.append(SavedHandle(tensor))
        if storage_key(tensor) in steady:
            handles[-1].keep(around)
        return handles[-1]

    with _alone(), saved_tensors_hooks(pack, SavedHandle.get):
        result = part.forward(*args, **kwargs)
    second, sizes = SecondRun(again, part.name), dict[int, int]()
    writes = [tensor._version for tensor in tensors] != versions
    for number, handle in enumerate(handles):
        if handle.is_open and writes:
            handle.keep(around)
        elif handle.is_open:
            sizes[storage_key(handle.tensor)] = handle.tensor.untyped_storage().nbytes()
            second.take(number, handle)
    return result, sum(sizes.values())


def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and isinstance(leaf[0], KeptTensor)


class _PartState:
    """All that a call depends on besides its inputs, as it is now: attributes and buffers of modules (running
    statistics, counters), the generators of torch, NumPy and Python, autocast. Parameters must not change."""

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor]) -> None:
        self._parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._attributes = [{**part.__dict__, "_buffers": _copied(part._buffers)} for part in self._parts]
        self._fixed = [KeptTensor(tensor) for part in self._parts for tensor in _must_not_change(part)]
        self._devices, self._states = get_device_states(*tensors)
        self._draws = torch.get_rng_state(), np.random.get_state(), random.getstate()
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        self._casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back for a while. Raises RuntimeError where what must not change has been written over."""
        for fixed in self._fixed:
            fixed.get()
        now = [dict(part.__dict__) for part in self._parts]
        draws = np.random.get_state(), random.getstate()
        with ExitStack() as stack:
            stack.callback(random.setstate, draws[1])
            stack.callback(np.random.set_state, draws[0])
            stack.callback(self._put, now)
            stack.enter_context(torch.random.fork_rng(self._devices))
            for kind, dtype, enabled in self._casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            self._put([{**each, "_buffers": _copied(each["_buffers"])} for each in self._attributes])
            torch.set_rng_state(self._draws[0])
            np.random.set_state(self._draws[1])
            random.setstate(self._draws[2])
            if self._devices:
                set_device_states(self._devices, self._states, device_type="cuda")
            yield

    def _put(self, attributes: Sequence[dict[str, Any]]) -> None:
        for part, each in zip(self._parts, attributes, strict=True):
            part.__dict__.clear()
            part.__dict__.update(each)


def _must_not_change(part: nn.Module) -> Iterator[torch.Tensor]:
    yield from (weight for weight in part._parameters.values() if weight is not None)
    yield from (buffer for buffer in part._buffers.values() if buffer is not None and buffer.nbytes > _SMALL)


def _copied(buffers: dict[str, Any]) -> dict[str, Any]:
    """Return the buffers, with copies of the small ones, over which the module may write."""
    return {
        name: buffer.detach().clone() if buffer is not None and buffer.nbytes <= _SMALL else buffer
        for name, buffer in buffers.items()
    }
