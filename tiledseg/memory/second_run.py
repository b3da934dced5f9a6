"""Saved tensors that are dropped after the forward pass, and had from a second run of the call that saved them.

A call is a node of a network of ours (`models.rebuild`) or a part of somebody's module (`memory.recomputing`). While it
runs, autograd saves a `SavedHandle` in the place of each tensor. When it has ended, each handle is told where its
tensor comes from: it is kept, computed by others, or had from a `SecondRun`.

The second run of a part takes the same inputs, in the state that the module and the generators of random numbers had:
the same bits, and nothing changes twice. A call that writes over its inputs, which could not run again, keeps what it
saves.
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

from tiledseg.memory.saved import Hooks, KeptTensor, hooks_around, storage_key

_SMALL = 1 << 20  # bytes of a buffer that is copied; a larger one must not change
_WITHIN = ContextVar("within", default=False)
_ONE_AT_A_TIME = threading.RLock()  # a second run takes a module's state away for a while


class _AllSeenError(BaseException):
    """The end of a second run that has saved all wanted tensors. No program on the way may catch it."""


class SavedHandle:
    """The object that autograd saves in the place of a tensor, which it holds until its call has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self.source: Callable[[], torch.Tensor] | None = None  # None until it is decided
        self.kind = _kind(tensor)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "its call has ended"
        return self._tensor

    def keep(self, hooks: Hooks | None) -> None:
        """Keep the tensor, by `hooks` where there are some."""
        self.have(KeptTensor(self.tensor, hooks, self._version).get)

    def have(self, source: Callable[[], torch.Tensor]) -> None:
        """Drop the tensor; `source` gives it when the backward pass asks for it."""
        self.source, self._tensor = source, None

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError, as autograd does, where it has been written over."""
        return self.tensor if self.source is None else self.source()


class SecondRun:
    """Tensors that a call saves, by their order in it. `run` runs the call once more, on the same inputs, in the same
    state. It ends as soon as it has saved all tensors that are still wanted."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run, self._name = run, name
        self._wanted: weakref.WeakValueDictionary[int, SavedHandle] = weakref.WeakValueDictionary()
        self._there: dict[int, torch.Tensor] = {}

    def take(self, number: int, handle: SavedHandle) -> None:
        """Drop the tensor of a handle, the `number`-th that the call has saved."""
        self._wanted[number] = handle
        handle.have(partial(self._get, number))

    def _get(self, number: int) -> torch.Tensor:
        with _ONE_AT_A_TIME:
            if number not in self._there:
                self._again()
            return self._there.pop(number)

    def _again(self) -> None:
        wanted = {number: handle.kind for number, handle in self._wanted.items()}
        there, seen = dict[int, torch.Tensor](), count()

        def pack(tensor: torch.Tensor) -> None:
            number = next(seen)
            if number in wanted:
                if _kind(tensor) != wanted[number]:
                    raise RuntimeError(differs.format(f"{_kind(tensor)} in the place of {wanted[number]}"))
                there[number] = tensor.detach()
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
    """Return True while a call of a part runs in this thread: parts within it run as they are."""
    return _WITHIN.get()


@contextmanager
def _alone() -> Iterator[None]:
    token = _WITHIN.set(True)
    try:
        yield
    finally:
        _WITHIN.reset(token)


def run_part(name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
    """Return the result of `forward`, a call of `module`, and the bytes that it would have kept for the backward
    pass."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    versions, around = [tensor._version for tensor in tensors], hooks_around()
    kept = {at: (KeptTensor(x, around), x.requires_grad) for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    plain = [None if at in kept else leaf for at, leaf in enumerate(leaves)]
    state = _PartState(module, tensors)

    def again() -> None:
        inputs = {at: x.get().detach().requires_grad_(learns) for at, (x, learns) in kept.items()}
        own_args, own_kwargs = tree_unflatten([inputs.get(at, leaf) for at, leaf in enumerate(plain)], form)
        with state.restored(), _alone():
            forward(*own_args, **own_kwargs)

    steady = {storage_key(tensor) for tensor in (*tensors, *module.parameters(), *module.buffers())}
    handles: list[SavedHandle] = []

    def pack(tensor: torch.Tensor) -> SavedHandle:
        handles.append(SavedHandle(tensor))
        if storage_key(tensor) in steady:
            handles[-1].keep(around)
        return handles[-1]

    with _alone(), saved_tensors_hooks(pack, SavedHandle.get):
        result = forward(*args, **kwargs)
    second, writes = SecondRun(again, name), [tensor._version for tensor in tensors] != versions
    opened = {number: handle for number, handle in enumerate(handles) if handle.source is None}
    sizes = {storage_key(h.tensor): h.tensor.untyped_storage().nbytes() for h in opened.values()}
    for given in tree_flatten(result)[0]:
        sizes.pop(storage_key(given) if isinstance(given, torch.Tensor) else 0, None)  # its user keeps it
    for number, handle in opened.items():
        if writes or not sizes:
            handle.keep(around)
        else:
            second.take(number, handle)
    return result, 0 if writes else sum(sizes.values())


class _PartState:
    """All that a call depends on besides its inputs, as it is now: attributes and buffers of modules (running
    statistics, counters), the generators of torch, NumPy and Python, autocast. Parameters must not change."""

    def __init__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        self._parts = list(module.modules())
        self._attributes = [{**part.__dict__, "_buffers": _copied(part._buffers)} for part in self._parts]
        large = (buffer for buffer in module.buffers() if buffer.nbytes > _SMALL)
        self._fixed = [KeptTensor(tensor) for tensor in (*module.parameters(), *large)]
        self._devices, self._states = get_device_states(*tensors)
        self._draws = torch.get_rng_state(), np.random.get_state(), random.getstate()
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        self._kind = list(kinds)[-1]
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
    """Return the buffers, with copies of the small ones, over which the module may write."""
    return {
        name: buffer.detach().clone() if buffer is not None and buffer.nbytes <= _SMALL else buffer
        for name, buffer in buffers.items()
    }


Result = TypeVar("Result")


class Notes:
    """Results of one node, in the order in which they came; `unread`: those still to be taken, while they are read."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.unread: Iterator[Any] | None = None

    @contextmanager
    def open(self, read: bool = False) -> Iterator[None]:
        """Write down the results that come meanwhile; with `read` give these, from the first one on, in the place of
        new ones."""
        token, self.unread = CURRENT.set(self), iter(self.results) if read else None
        try:
            yield
        finally:
            CURRENT.reset(token)
            self.unread = None


CURRENT: ContextVar[Notes | None] = ContextVar("notes", default=None)
"""The notes that are taken or read now."""


def noted(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, or that of the node's first run."""
    notes = CURRENT.get()
    if notes is not None and notes.unread is not None:
        earlier: Result = next(notes.unread)
        return earlier
    result = compute()
    if notes is not None:
        notes.results.append(result)
    return result


@contextmanager
def still_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the running statistics of norms in `modules` as they are: a forward pass that is made twice moves them once.
    The norms use the batch's statistics as before."""
    tracking = [m for module in modules for m in module.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]
