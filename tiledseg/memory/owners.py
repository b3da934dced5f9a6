"""Who holds a tensor's bytes: the identity of a storage, and how many tensors share it."""

from __future__ import annotations

import sys
from functools import cache

import torch

from tiledseg.errors import TiledsegError

StorageKey = int
"""Of a storage that lives: no two have the same at one time. Of one that is gone it may come again, as addresses do."""


def storage_key(tensor: torch.Tensor) -> StorageKey:
    return int(tensor.untyped_storage()._cdata)


def may_move(tensor: torch.Tensor, least: int) -> bool:
    """Whether it is of a kind whose storage of `least` bytes or more may leave: no weight, and nobody else's memory."""
    if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    storage = tensor.untyped_storage()
    return storage.resizable() and max(1, least) <= storage.nbytes()  # not resizable: somebody else's memory


def held_by(tensor: torch.Tensor, tensors: int) -> bool:
    """Whether nobody but `tensors` tensors holds the storage of `tensor`, itself among them: nobody else can read or
    write its bytes any more."""
    counted, handles = _counts(tensor)
    one, handles_of_one = _counts_of_one()
    return counted - one < tensors and handles <= handles_of_one


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Holders of the storage in C++, and of its Python object."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@cache
def _counts_of_one() -> tuple[int, int]:
    """What is counted where one tensor holds a storage. Raises TiledsegError where this version of torch counts in a
    way that does not tell one holder from two: nothing may then leave memory."""
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
