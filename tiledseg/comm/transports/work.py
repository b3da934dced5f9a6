"""Communication that has been started, and the tensors that carry it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiledseg.comm.watching.doing import waiting


class Work:
    """A sum, or an exchange of messages, under way. `finish` waits for it; without one there is nothing to wait for."""

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self._finish = finish

    @property
    def is_waited_for(self) -> bool:
        """True once somebody has waited for it, or where there was nothing to wait for."""
        return self._finish is None

    def wait(self) -> None:
        """Return once the tensors hold the result; on a GPU, once its current stream will see it. A second call does
        nothing: the tensors may have changed by then. Raises CommunicationError where a peer was lost."""
        if self._finish is not None:
            self._finish()
            self._finish = None


def sum_work(finish: Callable[[], object], staged: torch.Tensor, tensor: torch.Tensor) -> Work:
    """Return the work of a sum under way in `staged`, which is `tensor` itself wherever no copy was needed."""

    def wait() -> None:
        with waiting("a sum over ranks"):
            finish()
        copy_back(staged, tensor)

    return Work(wait)


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
