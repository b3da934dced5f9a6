"""Collectives and messages over MPI by mpi4py, for systems whose network only the vendor's MPI drives well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from mpi4py import MPI

from tiledseg.comm.collectives import Communicator, Message
from tiledseg.errors import CommunicationError

# MPI 3 counts elements with a C int. Half of its range keeps every piece clear of the limit.
_PIECE = 2**30


class MpiCommunicator(Communicator):
    """All ranks of an MPI communicator, duplicated so that its messages mix with no other user's.

    GPU tensors are staged through host memory. "Messages are non-overtaking" (MPI 4.1, 3.5): all messages have one tag,
    and those between two ranks match in the order of their posts. Open MPI moves large messages only inside its own
    calls, with little overlap. Two threads of a rank never call MPI at once: while autograd's thread of a GPU calls it,
    the main thread waits.
    """

    sums_on_host = True

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator.Dup()
        self.rank = communicator.rank
        self.size = communicator.size

    @contextmanager
    def peer_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            raise CommunicationError(f"{what} failed, a peer may be lost: {error}") from error

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start the sum. "MPI requires that all processes [...] receive identical results" (MPI 4.1, 6.9)."""
        pieces = [piece.numpy() for piece in tensor.reshape(-1).split(_PIECE)]
        requests = [self._communicator.Iallreduce(MPI.IN_PLACE, piece, op=MPI.SUM) for piece in pieces]
        return lambda: MPI.Request.Waitall(requests)

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        for piece in flat.split(_PIECE):
            self._communicator.Bcast(piece.numpy(), root=source)

    def _broadcast_object(self, value: Any, source: int) -> Any:
        return self._communicator.bcast(value, root=source)

    def _gather(self, value: Any) -> list[Any]:
        return self._communicator.allgather(value)

    def _barrier(self) -> None:
        self._communicator.Barrier()

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        mine = next((number for number, group in enumerate(groups) if self.rank in group and len(group) > 1), None)
        if mine is None:
            self._communicator.Split(MPI.UNDEFINED)
            return None
        part = cast("MPI.Intracomm", self._communicator.Split(mine, list(groups[mine]).index(self.rank)))
        communicator = MpiCommunicator(part)
        part.Free()
        return communicator

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        requests = [self._communicator.Irecv(piece, source=peer) for peer, piece in _pieces(receives)]
        requests += [self._communicator.Isend(piece, dest=peer) for peer, piece in _pieces(sends)]
        return lambda: MPI.Request.Waitall(requests)

    def _end(self) -> None:
        self._communicator.Free()


def _pieces(messages: Sequence[Message]) -> Iterator[tuple[int, Any]]:
    """Yield peer and buffer of every piece of each message."""
    for peer, tensor in messages:
        for piece in tensor.split(_PIECE):
            yield peer, piece.numpy()
