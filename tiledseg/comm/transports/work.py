"""Communication that has been started: what a rank waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tiledseg.comm.watching.doing import waiting


class Work(Protocol):
    """A sum, or an exchange of messages, under way."""

    def wait(self) -> None:
        """Return once the tensors hold the result. Raises CommunicationError where a peer was lost."""


class DoneWork:
    """Work that needed nothing to be done."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class SumWork:
    """A sum under way in `staged`, which is `tensor` itself wherever no copy was needed; `finish` waits for it."""

    finish: Callable[[], object]
    staged: torch.Tensor
    tensor: torch.Tensor

    def wait(self) -> None:
        """Return once `tensor` holds the sum; on a GPU, once the current stream will see it."""
        with waiting("a sum over ranks"):
            self.finish()
        copy_back(self.staged, self.tensor)


def copy_back(staged: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy into `tensor`, where `staged` is another one."""
    if staged.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(staged)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view; such a one is itself."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    # A single element counts as contiguous whatever its stride is, which reshape would keep and view would refuse.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
