"""Saved tensors that are dropped after the forward pass and recomputed by a second run of the call that saved them.

A call is a node of our networks (`models.rebuild`) or a part of a user's module (`memory.offload`). While it runs,
autograd saves a `SavedTensor` in place of each tensor. When it has ended, each of them is kept, or gets a source:
computed from other tensors, or recomputed by a `SecondRun`.

The second run of a part has the same inputs, module state and random generators: the same bits, and no state changes
twice. A call that overwrites its inputs could not run again, and keeps its tensors.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from tiledseg.memory.saved import SavedTensor, hooks_around, saving, storage_key

_SMALL = 1 << 20  # most bytes of a buffer that is copied; a larger one must not change
_WITHIN = ContextVar("within", default=False)
_ONE_AT_A_TIME = threading.RLock()  # a second run replaces a module's state for a while


class _AllSeenError(BaseException):
    """The end of a second run that has saved all wanted tensors. A BaseException: the module must not catch it."""


class SecondRun:
    """The dropped tensors of a call, by their order in it. `run` repeats the call with the same inputs and state; it
    ends as soon as all tensors still wanted are saved."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run, self._name = run, name
        self._wanted: weakref.WeakValueDictionary[int, SavedTensor] = weakref.WeakValueDictionary()
        self._kinds: dict[int, str] = {}
        self._there: dict[int, SavedTensor] = {}

    def take(self, number: int, saved: SavedTensor) -> None:
        """Drop a tensor, the call's `number`-th."""
        self._wanted[number], self._kinds[number] = saved, _kind(saved.tensor)
        saved.have(partial(self._get, number))

    def _get(self, number: int) -> torch.Tensor:
        with _ONE_AT_A_TIME:
            if number not in self._there:
                self._again()
            return self._there.pop(number).get()

    def _again(self) -> None:
        wanted = set(self._wanted)
        there, seen = dict[int, SavedTensor](), count()

        def pack(tensor: torch.Tensor) -> None:
            number = next(seen)
            if number in wanted:
                if _kind(tensor) != self._kinds[number]:
                    raise RuntimeError(differs.format(f"{_kind(tensor)} in place of {self._kinds[number]}"))
                there[number] = SavedTensor(tensor)
            if len(there) == len(wanted):
                raise _AllSeenError

        what = f"a second run of {self._name} has kept {{}}: it depends on more than its inputs, its module's"
        differs = f"{what} attributes and random numbers; leave model out of large_model_support"
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda packed: packed):
            try:
                self._run()
            except _AllSeenError:
                self._there = there
                return
        raise RuntimeError(differs.format("fewer tensors than the first"))


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def within() -> bool:
    """Return True while a call of a part runs in this thread: parts inside it are not split again."""
    return _WITHIN.get()


@contextmanager
def _alone() -> Iterator[None]:
    token = _WITHIN.set(True)
    try:
        yield
    finally:
        _WITHIN.reset(token)


def run_part(name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
    """Run `forward`, a call of `module`, with its saved tensors dropped; return the result and the bytes dropped."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    versions, around = [tensor._version for tensor in tensors], hooks_around()
    kept = {at: (SavedTensor(x, around), x.requires_grad) for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    plain = [None if at in kept else leaf for at, leaf in enumerate(leaves)]
    state = _PartState(module, tensors)

    def again() -> None:
        inputs = {at: x.get().detach().requires_grad_(learns) for at, (x, learns) in kept.items()}
        own_args, own_kwargs = tree_unflatten([inputs.get(at, leaf) for at, leaf in enumerate(plain)], form)
        with state.restored(), _alone():
            forward(*own_args, **own_kwargs)

    with _alone(), saving() as saved:
        result = forward(*args, **kwargs)
    second, writes = SecondRun(again, name), [tensor._version for tensor in tensors] != versions
    steady = {storage_key(tensor) for tensor in (*tensors, *module.parameters(), *module.buffers())}
    opened = {number: each for number, each in saved.items() if storage_key(each.tensor) not in steady}
    sizes = {storage_key(each.tensor): each.tensor.untyped_storage().nbytes() for each in opened.values()}
    for given in tree_flatten(result)[0]:
        sizes.pop(storage_key(given) if isinstance(given, torch.Tensor) else 0, None)  # the result's user keeps it
    for number, each in saved.items():
        if number in opened and sizes and not writes:
            second.take(number, each)
        else:
            each.keep(around)
    return result, 0 if writes else sum(sizes.values())


class _PartState:
    """The present state that a call depends on besides its inputs: attributes and buffers of modules (running
    statistics, counters), generators of torch, NumPy and Python, autocast. Parameters must not change."""

    def __init__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        self._parts = list(module.modules())
        self._attributes = [{**part.__dict__, "_buffers": _copied(part._buffers)} for part in self._parts]
        large = (buffer for buffer in module.buffers() if buffer.nbytes > _SMALL)
        self._fixed = [SavedTensor(tensor) for tensor in (*module.parameters(), *large)]
        self._devices, self._states = get_device_states(*tensors)
        self._draws = torch.get_rng_state(), np.random.get_state(), random.getstate()
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        self._kind = list(kinds)[-1]
        self._casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state inside. Raises RuntimeError if a parameter or a large buffer was overwritten."""
        for fixed in self._fixed:
            fixed.get()
        now = [dict(part.__dict__) for part in self._parts]
        draws = np.random.get_state(), random.getstate()
        with ExitStack() as stack:
            stack.callback(random.setstate, draws[1])
            stack.callback(np.random.set_state, draws[0])
            stack.callback(self._put, now)
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
            for kind, dtype, enabled in self._casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            self._put([{**each, "_buffers": _copied(each["_buffers"])} for each in self._attributes])
            torch.set_rng_state(self._draws[0])
            np.random.set_state(self._draws[1])
            random.setstate(self._draws[2])
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield

    def _put(self, attributes: Sequence[dict[str, Any]]) -> None:
        for part, each in zip(self._parts, attributes, strict=True):
            part.__dict__.clear()
            part.__dict__.update(each)


def _copied(buffers: dict[str, Any]) -> dict[str, Any]:
    """Return the buffers, with copies of the small ones, which the module may overwrite."""
    return {
        name: buffer.detach().clone() if buffer is not None and buffer.nbytes <= _SMALL else buffer
        for name, buffer in buffers.items()
    }


Result = TypeVar("Result")


class Notes:
    """Results recorded in a node's first run, in order, for its second. `unread`: those still to be read."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.unread: Iterator[Any] | None = None

    @contextmanager
    def open(self, read: bool = False) -> Iterator[None]:
        """Record results of `noted` inside; with `read`, return the recorded ones in place of new ones."""
        token, self.unread = CURRENT.set(self), iter(self.results) if read else None
        try:
            yield
        finally:
            CURRENT.reset(token)
            self.unread = None


CURRENT: ContextVar[Notes | None] = ContextVar("notes", default=None)
"""The notes that are written or read at present."""


def noted(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, or in a second run that of the node's first run."""
    notes = CURRENT.get()
    if notes is not None and notes.unread is not None:
        return next(notes.unread)
    result = compute()
    if notes is not None:
        notes.results.append(result)
    return result


@contextmanager
def still_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Do not update the running statistics of norms in `modules` inside: a repeated forward pass updates them once. The
    norms still use the batch's statistics."""
    tracking = [m for module in modules for m in module.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]
