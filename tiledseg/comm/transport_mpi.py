"""Collectives over MPI through mpi4py, for systems whose network only the vendor's MPI drives well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiledseg.comm.collectives import DoneWork, Work, as_bytes, check_source, sum_dtype
from tiledseg.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI 3 counts elements with a C int. Half of its range keeps every piece clear of the limit.
_PIECE = 2**30


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turns mpi4py's exception of a broken collective into CommunicationError."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        raise CommunicationError(f"{what} failed, a peer may be lost: {error}") from error


@dataclass(frozen=True)
class MpiWork:
    """Sums of the pieces of `staged` (CPU, contiguous) under way; the result belongs in `tensor`."""

    requests: list[MPI.Request]
    staged: torch.Tensor
    tensor: torch.Tensor

    def wait(self) -> None:
        """Returns once `tensor` holds the sum."""
        from mpi4py import MPI

        with peer_errors("all-reduce"):
            MPI.Request.Waitall(self.requests)
        if self.staged.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(self.staged)


class MpiCommunicator:
    """All ranks of an MPI communicator, duplicated so that no other user's messages meet ours. GPU tensors are staged
    through host memory."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator.Dup()
        self.rank = communicator.rank
        self.size = communicator.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """As the protocol says. "MPI requires that all processes [...] receive identical results" (MPI 4.1, 6.9)."""
        from mpi4py import MPI

        staged = tensor.detach().to(device="cpu", dtype=sum_dtype(tensor)).contiguous()
        if tensor.numel() == 0:
            return DoneWork()
        flat = staged.reshape(-1).numpy()
        with peer_errors("all-reduce"):
            requests = [
                self._communicator.Iallreduce(MPI.IN_PLACE, flat[start : start + _PIECE], op=MPI.SUM)
                for start in range(0, flat.size, _PIECE)
            ]
        return MpiWork(requests, staged, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """As the protocol says."""
        check_source(source, self.size)
        staged = tensor.detach().cpu().contiguous()
        flat = as_bytes(staged).numpy()
        with peer_errors("broadcast"):
            for start in range(0, flat.size, _PIECE):
                self._communicator.Bcast(flat[start : start + _PIECE], root=source)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """As the protocol says."""
        check_source(source, self.size)
        with peer_errors("broadcast"):
            return self._communicator.bcast(value, root=source)

    def gather_objects(self, value: Any) -> list[Any]:
        """As the protocol says."""
        with peer_errors("gather"):
            return self._communicator.allgather(value)

    def barrier(self) -> None:
        """As the protocol says."""
        with peer_errors("barrier"):
            self._communicator.Barrier()

    def close(self) -> None:
        """Waits for all ranks and frees the duplicate."""
        self.barrier()
        self._communicator.Free()
