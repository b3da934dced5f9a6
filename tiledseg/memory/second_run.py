"""Saved tensors that are dropped after the forward pass, and had from a second run of the call that saved them.

A call is a node of a network of ours (`models.rebuild`) or a part of somebody's module (`memory.recomputing`). While it
runs, autograd saves a `SavedHandle` in the place of each tensor. When it has ended, each handle is told where its
tensor comes from: it is kept, computed by others, or had from a `SecondRun`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from tiledseg.memory.saved import Hooks, KeptTensor

_ONE_AT_A_TIME = threading.RLock()  # a second run takes a module's state away for a while


class _AllSeenError(BaseException):
    """The end of a second run that has saved all wanted tensors. No program on the way may catch it."""


class SavedHandle:
    """The object that autograd saves in the place of a tensor, which it holds until its call has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._source: Callable[[], torch.Tensor] | None = None
        self.kind = _kind(tensor)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "its call has ended"
        return self._tensor

    @property
    def is_open(self) -> bool:
        """True until it is decided where the tensor comes from."""
        return self._source is None

    def keep(self, hooks: Hooks | None) -> None:
        """Keep the tensor, by `hooks` where there are some."""
        self.have(KeptTensor(self.tensor, hooks, self._version).get)

    def have(self, source: Callable[[], torch.Tensor]) -> None:
        """Drop the tensor; `source` gives it when the backward pass asks for it."""
        self._source, self._tensor = source, None

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError, as autograd does, where it has been written over."""
        return self.tensor if self._source is None else self._source()


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
                self._there = self._again()
            return self._there.pop(number)

    def _again(self) -> dict[int, torch.Tensor]:
        wanted = {number: handle.kind for number, handle in self._wanted.items()}
        there: dict[int, torch.Tensor] = {}
        seen = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal seen
            if seen in wanted:
                if _kind(tensor) != wanted[seen]:
                    raise self._differs(f"{_kind(tensor)} in the place of {wanted[seen]}")
                there[seen] = tensor.detach()
            seen += 1
            if len(there) == len(wanted):
                raise _AllSeenError

        with torch.enable_grad(), saved_tensors_hooks(pack, _nothing):
            try:
                self._run()
            except _AllSeenError:
                return there
        raise self._differs("fewer tensors than the first")

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"a second run of {self._name} has kept {how}: it depends on more than its inputs, its module's "
            "attributes and random numbers; leave model out of large_model_support"
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _nothing(packed: object) -> torch.Tensor:
    raise AssertionError("a second run is not differentiated")
