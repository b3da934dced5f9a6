"""Tensors that are saved for a backward pass, and who holds their bytes.

Where saving is hooked, autograd does not look at a tensor's version; it is looked at here, with autograd's own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from tiledseg.errors import TiledsegError


class Hooks(NamedTuple):
    """Functions that keep a tensor somewhere, and give it back. `passed` is called where a node has run, which holds
    none of its tensors any more."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    passed: Callable[[], None] = lambda: None


def hooks_around() -> Hooks | None:
    """Return the saved-tensor hooks that are in force, which others would hide."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else Hooks(*hooks)


class KeptTensor:
    """A tensor that stays as it was when it was saved, or at `version`: where it is, or by `hooks`."""

    __slots__ = ("_hooks", "_packed", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None = None, version: int | None = None) -> None:
        self._hooks, self._version = hooks, tensor._version if version is None else version
        # An alias: the tensor itself may have been made by the node that keeps it, which would be a circle.
        self._packed: Any = tensor.detach() if hooks is None else hooks.pack(tensor)

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError, as autograd does, where it has been written over."""
        if self._hooks is not None:
            return self._hooks.unpack(self._packed)
        tensor: torch.Tensor = self._packed
        check_version(tensor, self._version)
        return tensor


def check_version(tensor: torch.Tensor, expected: int) -> None:
    """Raise RuntimeError, as autograd does, where a tensor has been written over since it had this version."""
    if tensor._version != expected:
        raise overwritten(tensor.dtype, tuple(tensor.shape), tensor._version, expected)


def overwritten(dtype: torch.dtype, shape: tuple[int, ...], version: int, expected: int) -> RuntimeError:
    """Return autograd's error, which programs look for by its first words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead. Compute on a copy "
        "(x.clone()), or leave out the operation that writes over it"
    )


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


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a live storage. One that is gone may give its key to another one, as addresses do."""
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
