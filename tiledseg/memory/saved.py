"""Tensors that are saved for a backward pass, and the holders of their bytes.

Autograd does not check the version of a tensor saved by hooks; this module does, with autograd's own error message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch


class Hooks(NamedTuple):
    """Functions that store a tensor and give it back. `passed` is called after each node, when the node's code holds
    none of its tensors any more."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    passed: Callable[[], None] = lambda: None


def hooks_around() -> Hooks | None:
    """Return the saved-tensor hooks in force, which new hooks would hide."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else Hooks(*hooks)


class SavedTensor:
    """A tensor that is saved in place, by `hooks`, or given by another source. `get` raises RuntimeError, as autograd
    does, if it was overwritten in place."""

    __slots__ = ("__weakref__", "_source", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None = None) -> None:
        # An alias: the tensor itself may be a result of the node that keeps it, a reference cycle.
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._source: Callable[[], torch.Tensor] | None = None
        self.keep(hooks)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "it is not in place"
        return self._tensor

    @property
    def is_overwritten(self) -> bool:
        return self.tensor._version != self._version

    def keep(self, hooks: Hooks | None) -> None:
        """Keep the tensor by `hooks`; None: in place."""
        if hooks is not None:
            self.have(partial(hooks.unpack, hooks.pack(self.tensor)))

    def have(self, source: Callable[[], torch.Tensor]) -> None:
        """Drop the tensor; the backward pass gets it from `source`."""
        self._source, self._tensor = source, None

    def get(self) -> torch.Tensor:
        if self._source is not None:
            return self._source()
        check_version(self.tensor, self._version)
        return self.tensor


@contextmanager
def saving() -> Iterator[dict[int, SavedTensor]]:
    """Collect the tensors that autograd saves inside, by their order. At the end those that were overwritten are
    removed: they stay in place, so that their use raises autograd's error."""
    saved: dict[int, SavedTensor] = {}
    numbers = count()

    def pack(tensor: torch.Tensor) -> SavedTensor:
        made = saved[next(numbers)] = SavedTensor(tensor)
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.get):
        yield saved
    for number in [number for number, each in saved.items() if each.is_overwritten]:
        del saved[number]


def check_version(tensor: torch.Tensor, expected: int) -> None:
    """Raise RuntimeError, as autograd does, if a tensor was overwritten since version `expected`."""
    if tensor._version != expected:
        raise overwritten(tensor.dtype, tuple(tensor.shape), tensor._version, expected)


def overwritten(dtype: torch.dtype, shape: tuple[int, ...], version: int, expected: int) -> RuntimeError:
    """Return autograd's error for an overwritten tensor: programs recognise it by its first words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead. Compute on a copy "
        "(x.clone()), or leave out the operation that writes over it"
    )


class StorageView(NamedTuple):
    """A tensor's view of its storage: dtype, shape, strides and offset (elements), conjugate and negative bits."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        stride, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), stride, offset, tensor.is_conj(), tensor.is_neg())

    def over(self, flat_P: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this view over all bytes of a storage, of which it shares the version."""
        whole = flat_P.numel() // self.dtype.itemsize * self.dtype.itemsize
        seen = flat_P[:whole].view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        seen = seen.conj() if self.conjugate else seen
        return torch._neg_view(seen) if self.negative else seen


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a live storage. Like an address, it may be reused once the storage is freed."""
    return int(tensor.untyped_storage()._cdata)


def may_move(tensor: torch.Tensor, least: int) -> bool:
    """Return True if the tensor's storage may leave: at least `least` bytes, no weight, and memory of torch's own."""
    if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    storage = tensor.untyped_storage()
    return storage.resizable() and max(1, least) <= storage.nbytes()  # not resizable: another library's memory


def held_by(tensor: torch.Tensor, tensors: int) -> bool:
    """Return True if only `tensors` tensors, itself included, hold the storage of `tensor`: nothing else can read or
    write its bytes."""
    counted, handles = _counts(tensor)
    one, handles_of_one = _counts_of_one()
    return counted - one < tensors and handles <= handles_of_one


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the reference counts of the storage in C++ and of its Python object."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@cache
def _counts_of_one() -> tuple[int, int]:
    """Return the reference counts of a storage with one tensor, as this version of torch counts."""
    tensor = torch.zeros(4)
    _counts(tensor)  # makes the Python object
    return _counts(tensor)
