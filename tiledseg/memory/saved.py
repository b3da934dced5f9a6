"""The objects that autograd keeps in place of a tensor, and who holds a tensor's bytes.

Where saving is hooked, autograd does not look at a tensor's version; it is looked at here, with autograd's own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from tiledseg.errors import TiledsegError


class StorageView(NamedTuple):
    """The view that a tensor has of its storage."""

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
        """Return the tensor over all bytes of a storage; it shares their version."""
        whole = flat_P.numel() // self.dtype.itemsize * self.dtype.itemsize
        seen = flat_P[:whole].view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        seen = seen.conj() if self.conjugate else seen
        return torch._neg_view(seen) if self.negative else seen


class UnmovedTensor:
    """A tensor that stays: a weight, a small one, one of a kind that is not moved."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = tensor.detach()  # the tensor itself may have been made by the node that keeps it: a circle
        self.version = tensor._version

    def tensor(self) -> torch.Tensor:
        """Raises RuntimeError, as autograd does, where it has been written over."""
        if self.alias._version != self.version:
            raise overwritten(self.alias.type(), tuple(self.alias.shape), self.alias._version, self.version)
        return self.alias


class Saved:
    """A view of a storage that may leave. `alias` is None while it is away; `found`: its version when it left."""

    __slots__ = ("__weakref__", "_dropped", "alias", "found", "number", "version", "view")

    def __init__(self, tensor: torch.Tensor, number: int, dropped: Callable[[int], None]) -> None:
        self.alias: torch.Tensor | None = tensor.detach()
        self.version = self.found = tensor._version
        self.view = StorageView.of(tensor)
        self.number = number
        self._dropped = dropped

    def leave(self) -> None:
        """Let go of the bytes, which are elsewhere from here on."""
        self.look()
        self.alias = None

    def look(self) -> None:
        if self.alias is not None:
            self.found = self.alias._version

    def check(self) -> None:
        """Raises RuntimeError, as autograd does, where the bytes have been written over since they were saved."""
        self.look()
        if self.found != self.version:
            raise overwritten(str(self.view.dtype), self.view.shape, self.found, self.version)

    def __del__(self) -> None:
        # May run in any thread and at any point of it: it may take no lock.
        self._dropped(self.number)


def overwritten(kind: str, shape: tuple[int, ...], version: int, expected: int) -> RuntimeError:
    """Autograd's error, which programs look for by its first words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {version}; expected version {expected} instead. Compute on a copy "
        "(x.clone()), or leave out the operation that writes over it"
    )


StorageKey = int
"""The identity of a live storage. A storage that is gone may give its key to another one, as addresses do."""


def storage_key(tensor: torch.Tensor) -> StorageKey:
    return int(tensor.untyped_storage()._cdata)


def may_move(tensor: torch.Tensor, least: int) -> bool:
    """Return True if its storage of `least` bytes or more may leave: no weight, and nobody else's memory."""
    if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    storage = tensor.untyped_storage()
    return storage.resizable() and max(1, least) <= storage.nbytes()  # not resizable: somebody else's memory


def held_by(tensor: torch.Tensor, tensors: int) -> bool:
    """Return True if only `tensors` tensors hold the storage of `tensor`, itself among them: nobody else can read or
    write its bytes any more."""
    counted, handles = _counts(tensor)
    one, handles_of_one = _counts_of_one()
    return counted - one < tensors and handles <= handles_of_one


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the holders of the storage in C++, and of its Python object."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@cache
def _counts_of_one() -> tuple[int, int]:
    """Count the holders where one tensor holds a storage. Raises TiledsegError where this version of torch does not
    tell one holder from two: nothing may then leave memory."""
    tensor = torch.zeros(4)
    _counts(tensor)
    one = _counts(tensor)
    alias = tensor.detach()
    two = _counts(tensor)[0]
    del alias
    handle = tensor.untyped_storage()
    handles = _counts(tensor)[1]
    del handle
    if two != one[0] + 1 or handles != one[1] + 1 or _counts(tensor) != one:
        raise TiledsegError(
            f"torch {torch.__version__} counts the holders of a storage as {one}, {two} and {handles}: one, two, and "
            "one with a handle cannot be told apart; use a version that setup.cfg promises"
        )
    return one
