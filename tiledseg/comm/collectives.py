"""Collective operations over the ranks of a communicator, for any transport.

Every rank of the communicator calls every method, in the same order, with tensors of the same shape and dtype. Under
that rule nothing can deadlock: all ranks take part in each operation, and asynchronous ones start in the same order.
A rank that fails breaks the rule for all; `session` then ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from tiledseg.comm.doing import waiting
from tiledseg.errors import CommunicationError
from tiledseg.memory.device import is_gpu

# Sums of 16-bit floats are taken in float32: a sum over 1000 ranks in bfloat16 would keep no digit, and the transports
# round at different places, so that results would depend on them.
_SUM_DTYPES = {dtype: dtype for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)} | {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


class Work:
    """A sum or an exchange of messages in flight. `finish` waits for it; None: nothing to wait for."""

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self.finish = finish

    def wait(self) -> None:
        """Return once the tensors hold the result; on a GPU, once its current stream will see it. A second call does
        nothing, since the tensors may have changed. Raises CommunicationError for a lost peer."""
        if self.finish is not None:
            self.finish()
            self.finish = None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} has no bytes in one piece"
    # A single element counts as contiguous whatever its stride is, which reshape would keep and view would refuse.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Message(NamedTuple):
    """A contiguous tensor of any shape and dtype, sent to rank `peer` or received from it.

    `peer`: a rank of the communicator. Only bytes travel: both ends know shape and dtype.
    """

    peer: int
    tensor: torch.Tensor


class Turns:
    """The NCCL communicator that may have operations in flight on this rank, and these operations.

    An NCCL operation is a kernel that fills a part of the GPU until its peers have run theirs. No order is promised
    between two communicators (nccl#783), and ranks that choose different orders wait for each other forever. So a rank
    waits for its work on one communicator before it starts work on another. On a GPU the stream waits, not the host.
    The operations of a rank are then one sequence, and the sequences of all ranks follow one common order
    (docs/explanation/communication.md). `tests/law/test_steps.py` replays the orders of its trainings.
    """

    def __init__(self) -> None:
        self._owner: object = None
        self._flying: list[Work] = []

    def take(self, owner: object) -> None:
        """Wait until no other communicator than `owner` has operations in flight."""
        if owner != self._owner:
            for work in self._flying:
                work.wait()
            self._owner, self._flying = owner, []

    def started(self, work: Work) -> Work:
        """Record an operation that the owner has started. The owner waits for it, or the next owner does."""
        self._flying = [*(each for each in self._flying if each.finish is not None), work]
        return work


class Communicator:
    """Collective operations over `size` ranks, of which this one is `rank`, and messages between two.

    This class itself is one rank alone: every operation is the identity and needs no library. A transport implements
    `post` and the methods with an underscore, for contiguous tensors that are not empty. `is_part`: made by `split`.
    `turns`: shared with the parts and the messages (None: all may be in flight together); objects and barriers
    travel between hosts and take no turn. `sums_on_host`: sums and broadcasts of GPU tensors go through host memory.
    """

    rank = 0
    size = 1
    is_part = False
    turns: Turns | None = None
    sums_on_host = False

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Start the in-place sum of `tensor` over all ranks. The caller must not use the tensor until `.wait()`
        returns.

        Takes any shape and strides, on the CPU or a GPU; float32, float64, int32, int64, and bfloat16 and float16,
        which are summed in float32 and rounded once. All ranks get the same bits. The sum is its own adjoint. Raises
        CommunicationError for another dtype or a lost peer.
        """
        staged = self._staged(tensor, sum_dtype(tensor))
        if tensor.numel() == 0:
            return Work()
        self.take_turn(self)
        with self.peer_errors("all-reduce"):
            finish = self._sum(staged)

        def wait() -> None:
            with self.talk("all-reduce", "a sum over ranks"):
                finish()
            _copy_back(staged, tensor)

        return self.started(Work(wait))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor`, of any dtype, on every rank with the bits of rank `source`; return when done."""
        if tensor.numel() == 0:
            return
        staged = self._staged(tensor, tensor.dtype)
        self.take_turn(self)
        with self.talk("broadcast", "a broadcast from rank %d of %d", source, self.size):
            self._broadcast(as_bytes(staged), source)
        _copy_back(staged, tensor)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable `value` of rank `source` on every rank; other ranks' values are ignored."""
        with self.talk("broadcast", "a broadcast from rank %d of %d", source, self.size):
            return self._broadcast_object(value, source)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks in the order of ranks, on every rank."""
        with self.talk("gather", "a gather over %d ranks", self.size):
            return self._gather(value)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        with self.talk("barrier", "a barrier of %d ranks", self.size):
            self._barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the group of `groups` that this rank is in, whose ranks count in the group's
        order.

        Collective over all ranks, which pass the same groups: lists of ranks with no rank in two of them. A rank in no
        group, or alone in one, gets a communicator of one rank. Only the communicator of the whole job can be split, as
        often as wanted, since torch's groups are made by all ranks of it; close the parts before the whole.
        """
        assert not self.is_part, "a part cannot be split"
        self.take_turn(None)
        with self.talk("split", "a split of %d ranks", self.size):
            part = self._split(groups)
        if part is None:
            return Communicator()
        part.is_part, part.turns = True, self.turns
        return part

    def connect(self) -> None:
        """Connect all ranks for messages, if the transport demands it. Collective."""

    def close(self) -> None:
        """Close the communicator: the last collective call of its ranks. Closing a part leaves the whole open.

        Waits for all ranks, since rank 0 may hold the store that the others still use.
        """
        self.take_turn(None)
        self.barrier()
        self._end()

    def reads(self, tensor: torch.Tensor) -> bool:
        """Return True if messages of `tensor` go without a host buffer."""
        return not is_gpu(tensor.device)

    def peer_errors(self, what: str) -> AbstractContextManager[None]:
        """Turn the transport's exception of a failed operation `what` into CommunicationError."""
        return nullcontext()

    @contextmanager
    def talk(self, what: str, words: str, *values: object) -> Iterator[None]:
        """Name the operation `what` in the errors of lost peers, and for the watch by `words` and `values`."""
        with waiting(words, *values), self.peer_errors(what):
            yield

    def _staged(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        device = "cpu" if self.sums_on_host else tensor.device
        return tensor.detach().to(device, dtype).contiguous()

    def take_turn(self, owner: object) -> None:
        """Wait until no other owner has operations in flight, if the transport demands it."""
        if self.turns is not None:
            self.turns.take(owner)

    def started(self, work: Work) -> Work:
        return work if self.turns is None else self.turns.started(work)

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start the sum in place; return a function that waits for it."""
        return int

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Overwrite bytes with those of rank `source`."""

    def _broadcast_object(self, value: Any, source: int) -> Any:
        return value

    def _gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def _barrier(self) -> None: ...

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Return the communicator of this rank's group; None if the rank has no group or is alone in it."""
        return None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        """Post messages of flat uint8 tensors, none empty; return a function that waits for all of them.

        The caller, a `PointToPoint`, keeps the tensors alive until then. Messages between two ranks are matched in the
        order of their posts.
        """
        raise AssertionError("one rank alone has no peer")

    def _end(self) -> None: ...


class RehearsedCommunicator(Communicator):
    """Rank `rank` of `size` without peers: records its operations, in order, and sends nothing.

    Every operation ends at once: sums and broadcasts leave their tensors unchanged, a gather repeats this rank's
    object. `groups`: this rank's parts. `sent`, `received`: the bytes of its messages to and from each peer. `summed`:
    the bytes of its sums over each group (an empty group: all ranks). Its parts record into these too.
    """

    def __init__(self, rank: int, size: int, group: tuple[int, ...] = ()) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.groups: list[tuple[int, ...]] = []
        self.sent: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.summed: dict[tuple[int, ...], list[int]] = {}

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        self.summed.setdefault(self._group, []).append(tensor.nbytes)
        return int

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        own = next((tuple(group) for group in groups if self.rank in group), ())
        if len(own) < 2:
            return None
        self.groups.append(own)
        part = RehearsedCommunicator(own.index(self.rank), len(own), own)
        part.sent, part.received, part.summed = self.sent, self.received, self.summed
        return part

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        for messages, lists in ((sends, self.sent), (receives, self.received)):
            for peer, tensor in messages:
                lists.setdefault(peer, []).append(tensor.numel())
        return int


def unmatched(ranks: dict[int, RehearsedCommunicator]) -> list[str]:
    """Return a line for each message that its peer does not await, and for each rank whose sums differ from those of
    its group in order or bytes. Pure."""
    faults = []
    first: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, own in ranks.items():
        for group, sums in own.summed.items():
            first.setdefault(group, (rank, sums))
    for group, (other, theirs) in first.items():
        for rank in group or ranks:
            if rank in ranks and (sums := ranks[rank].summed.get(group, [])) != theirs:
                faults.append(f"rank {rank} sums {sums} bytes over its group, and rank {other} {theirs}")
    for rank, own in ranks.items():
        for peer in sorted(own.sent.keys() | {p for p in own.received if p in ranks}):
            sent, awaited = own.sent.get(peer, []), ranks[peer].received.get(rank, []) if peer in ranks else None
            if sent != awaited:
                faults.append(f"rank {rank} sends rank {peer} messages of {sent} bytes, which awaits {awaited}")
    return faults


def _copy_back(staged: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `staged` into `tensor` unless they share memory."""
    if staged.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(staged)


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed. Raises CommunicationError for a dtype that has none."""
    if tensor.dtype not in _SUM_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUM_DTYPES)
        raise CommunicationError(f"cannot sum {str(tensor.dtype).removeprefix('torch.')} over ranks: use {allowed}")
    return _SUM_DTYPES[tensor.dtype]
