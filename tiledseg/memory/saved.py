"""What autograd gets to keep in place of a tensor: the tensor's own bytes as long as they are in memory, else its view
of bytes that have left.

Where saving is hooked, autograd does not look at a tensor's version; it is looked at here, with autograd's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class View(NamedTuple):
    """How a tensor sees its storage: all that is needed to see it so again."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        stride, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), stride, offset, tensor.is_conj(), tensor.is_neg())

    def over(self, flat_P: torch.Tensor) -> torch.Tensor:
        """The tensor over all bytes of a storage; it shares their version."""
        whole = flat_P.numel() // self.dtype.itemsize * self.dtype.itemsize
        seen = flat_P[:whole].view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        seen = seen.conj() if self.conjugate else seen
        return torch._neg_view(seen) if self.negative else seen


class Kept:
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
        self.view = View.of(tensor)
        self.number = number
        self._dropped = dropped

    def leave(self) -> None:
        """Its bytes are elsewhere from here on."""
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
