"""Collectives and messages over MPI through mpi4py, for systems whose network only the vendor's MPI drives well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from tiledseg.comm.transports.collectives import (
    Communicator,
    SerialCommunicator,
    check_groups,
    check_source,
    sum_dtype,
)
from tiledseg.comm.transports.mpi import check_threads
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import Work, as_bytes, copy_back, sum_work
from tiledseg.comm.watching.doing import waiting
from tiledseg.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI 3 counts elements with a C int. Half of its range keeps every piece clear of the limit.
_PIECE = 2**30


def check_thread_level() -> None:
    """Raise ConfigError where this MPI may be called from the main thread only."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip()
    check_threads(MPI.Query_thread(), MPI.THREAD_SERIALIZED, library)


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn mpi4py's exception of a broken collective into CommunicationError."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        raise CommunicationError(f"{what} failed, a peer may be lost: {error}") from error


class MpiCommunicator(Communicator):
    """All ranks of an MPI communicator, duplicated so that no other user's messages meet ours.

    GPU tensors are staged through host memory, but for messages where the MPI library takes pointers to GPU memory
    (`cuda_aware`). `is_part`: made by `split`. "Messages are non-overtaking" (MPI 4.1, 3.5): those of two ranks, all
    under one tag, are matched in the order in which they are posted. Open MPI moves large messages only inside its own
    calls: overlap with computation is then little. No two threads of a rank call MPI at once: autograd's thread of a
    GPU calls it while the main one waits for that thread.
    """

    def __init__(self, communicator: MPI.Intracomm, cuda_aware: bool = False, is_part: bool = False) -> None:
        self._communicator = communicator.Dup()
        self._cuda_aware = cuda_aware
        self._is_part = is_part
        self.rank = communicator.rank
        self.size = communicator.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """ "MPI requires that all processes [...] receive identical results" (MPI 4.1, 6.9)."""
        from mpi4py import MPI

        staged = tensor.detach().to(device="cpu", dtype=sum_dtype(tensor)).contiguous()
        if tensor.numel() == 0:
            return Work()
        flat = staged.reshape(-1).numpy()
        with peer_errors("all-reduce"):
            requests = [
                self._communicator.Iallreduce(MPI.IN_PLACE, flat[start : start + _PIECE], op=MPI.SUM)
                for start in range(0, flat.size, _PIECE)
            ]
        return sum_work(lambda: _wait(requests, "all-reduce"), staged, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        check_source(source, self.size)
        staged = tensor.detach().cpu().contiguous()
        flat = as_bytes(staged).numpy()
        with waiting("a broadcast from rank %d of %d", source, self.size), peer_errors("broadcast"):
            for start in range(0, flat.size, _PIECE):
                self._communicator.Bcast(flat[start : start + _PIECE], root=source)
        copy_back(staged, tensor)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        check_source(source, self.size)
        with waiting("a broadcast from rank %d of %d", source, self.size), peer_errors("broadcast"):
            return self._communicator.bcast(value, root=source)

    def gather_objects(self, value: Any) -> list[Any]:
        with waiting("a gather over %d ranks", self.size), peer_errors("gather"):
            return self._communicator.allgather(value)

    def barrier(self) -> None:
        with waiting("a barrier of %d ranks", self.size), peer_errors("barrier"):
            self._communicator.Barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        from mpi4py import MPI

        check_groups(groups, self.size, self._is_part)
        mine = next((number for number, group in enumerate(groups) if self.rank in group and len(group) > 1), None)
        color = MPI.UNDEFINED if mine is None else mine
        with waiting("a split of %d ranks", self.size), peer_errors("split"):
            key = 0 if mine is None else list(groups[mine]).index(self.rank)
            part = cast("MPI.Intracomm", self._communicator.Split(color, key))
            if mine is None:
                return SerialCommunicator()
            communicator = MpiCommunicator(part, self._cuda_aware, is_part=True)
            part.Free()
        return communicator

    def reads(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda or self._cuda_aware

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        for device in {tensor.device for _, tensor in (*sends, *receives) if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # MPI knows nothing of the kernels still to run
        with peer_errors("exchange"):
            requests = [self._communicator.Irecv(piece, source=peer) for peer, piece in _pieces(receives)]
            requests += [self._communicator.Isend(piece, dest=peer) for peer, piece in _pieces(sends)]
        return lambda: _wait(requests, "exchange")

    def close(self) -> None:
        """Wait for all ranks and free the duplicate."""
        self.barrier()
        self._communicator.Free()


def _wait(requests: list[MPI.Request], what: str) -> None:
    from mpi4py import MPI

    with peer_errors(what):
        MPI.Request.Waitall(requests)


def _pieces(messages: Sequence[Message]) -> Iterator[tuple[int, Any]]:
    """Yield peer and buffer of each piece of each message. mpi4py reads GPU tensors by their array interface."""
    for peer, tensor in messages:
        for piece in tensor.split(_PIECE):
            yield peer, piece if piece.is_cuda else piece.numpy()
