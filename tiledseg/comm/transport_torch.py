"""Collectives and messages over torch.distributed, by functions that every supported version of torch has.

Gloo carries CPU tensors and Python objects. NCCL (XCCL on XPU) carries GPU tensors if it is the transport.
"""

from __future__ import annotations

import atexit
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tiledseg.comm.collectives import Communicator, Message, Turns
from tiledseg.errors import CommunicationError, first_line
from tiledseg.memory.device import BACKENDS, gloo_connects, is_gpu, kind_here

# In effect no timeout of torch's: the watch ends a job that stands still, with a line that names the rank, and lets a
# rank that makes progress write or validate for any time.
COLLECTIVE_TIMEOUT = timedelta(days=365)
_TAGS = 2**30  # a Gloo tag is a whole number of 31 bits


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn torch's RuntimeError of a failed collective into CommunicationError with the first line of its message,
    without the name of torch's source file. Errors of memory, RuntimeErrors too, pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        reason = re.sub(r"^\[[^\]]*\]\s*|\. This is typically caused by.*$", "", first_line(error))
        raise CommunicationError(f"{what} failed, a peer may be lost: {reason}") from error


_OPEN: dict[TorchCommunicator, None] = {}  # in the order in which all ranks have made them


def _close_all() -> None:
    for communicator in reversed(list(_OPEN)):
        communicator._end()


def of_ranks(ranks: Sequence[int], with_nccl: bool) -> TorchCommunicator | None:
    """Return the communicator of `ranks` of the job, in this order; None on a rank that is not among them.

    Collective over the whole job, in one order, but no rank waits for another: a rank outside the group skips the store
    (30 us a group), and members connect at their first message. torch sorts a group's ranks (only the newest versions
    have `sort_ranks=False`), so messages and broadcasts name ranks of the job.
    """
    new_group = partial(dist.new_group, list(ranks), timeout=COLLECTIVE_TIMEOUT)
    with gloo_connects():
        host = new_group(backend="gloo")
    gpu = new_group(backend=BACKENDS[kind_here().type]) if with_nccl else host
    return TorchCommunicator(ranks, host, gpu) if dist.get_rank() in ranks else None


def all_ranks(gpu_of: torch.device | None = None) -> TorchCommunicator:
    """Return the communicator of all ranks of the job over the default group, which is Gloo's and already started.

    `gpu_of`: the rank's GPU, for which a group of NCCL's is made. Collective then.
    """
    everyone = dist.group.WORLD
    assert everyone is not None, "the process group is started before its communicator"
    gpu = everyone
    if gpu_of is not None:
        gpu = dist.new_group(backend=BACKENDS[gpu_of.type], timeout=COLLECTIVE_TIMEOUT, device_id=gpu_of)
    return TorchCommunicator(range(dist.get_world_size()), everyone, gpu)


class TorchCommunicator(Communicator):
    """All ranks of two process groups, `ranks` of the job in the communicator's order.

    `host`: Gloo's group, for CPU tensors and objects. `gpu`: NCCL's group for GPU tensors, or `host`, and then messages
    go through host memory. Never None, which torch takes for the whole job: a sum over a part would silently be one
    over all. NCCL's group carries sums and messages alike, since every rank starts them in one common order
    (docs/explanation/communication.md).

    Messages between two ranks match in order: by NCCL's own rule, or by a running number in Gloo's tag. Parts of NCCL
    take turns.
    """

    def __init__(self, ranks: Sequence[int], host: dist.ProcessGroup, gpu: dist.ProcessGroup) -> None:
        self._ranks, self._host, self._gpu = tuple(ranks), host, gpu
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._with_nccl = gpu is not host
        self.turns = Turns() if self._with_nccl else None
        _OPEN[self] = None
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # after all others, so that it runs before them

    def peer_errors(self, what: str) -> AbstractContextManager[None]:
        return peer_errors(what)

    def reads(self, tensor: torch.Tensor) -> bool:
        return not is_gpu(tensor.device) or self._with_nccl

    def connect(self) -> None:
        if self._with_nccl:
            # The first operation of a group of NCCL connects its ranks, so all of them must take part in it.
            with peer_errors("opening of messages"):
                dist.all_reduce(torch.zeros(1, device=kind_here()), group=self._gpu)

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start the sum. Gloo and NCCL reduce each piece on one rank and copy it to the others: equal bits."""
        return _wait_for([dist.all_reduce(tensor, group=self._carrier(tensor), async_op=True)])

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
        dist.broadcast(flat, self._ranks[source], self._carrier(flat))

    def _broadcast_object(self, value: Any, source: int) -> Any:
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, self._ranks[source], self._host)
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        """Gather in the order of torch's ranks, which ascend, and reorder the values to this communicator's ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        places = {rank: place for place, rank in enumerate(sorted(self._ranks))}
        return [values[places[rank]] for rank in self._ranks]

    def _barrier(self) -> None:
        """Sum a zero: a barrier of NCCL's would need a device."""
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=self._host)

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        made = [of_ranks(group, self._with_nccl) for group in groups if len(group) > 1]
        return next((own for own in made if own is not None), None)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        """Post GPU tensors to NCCL as one batch, in which their order does not matter, and the others to Gloo."""
        ranks, batch, works = self._ranks, list[dist.P2POp](), list[Any]()
        kinds = ((dist.irecv, receives, self._received), (dist.isend, sends, self._sent))
        for move, messages, _ in kinds:
            batch += [dist.P2POp(move, x, ranks[peer], self._gpu) for peer, x in messages if is_gpu(x.device)]
        if batch:
            works += dist.batch_isend_irecv(batch)
        for move, messages, count in kinds:
            for peer, tensor in messages:
                if not is_gpu(tensor.device):
                    count[peer] += 1
                    works.append(move(tensor, ranks[peer], self._host, count[peer] % _TAGS))
        return _wait_for(works)

    def _carrier(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self._gpu if is_gpu(tensor.device) else self._host

    def _end(self) -> None:
        """Destroy the groups, those of all parts with the default group, and return once their threads have ended.

        A thread of Gloo's that frees a tensor during the interpreter's shutdown aborts the process. A group's
        destructor waits for its threads, and runs once nothing refers to the group. It sends nothing: no rank waits for
        another. A second call does nothing.
        """
        _OPEN.pop(self, None)
        made = dict.fromkeys(vars(self).pop(name) for name in ("_gpu", "_host") if name in vars(self))
        ends_job = dist.group.WORLD in made
        for group in made:
            with contextlib.suppress(ValueError):  # destroyed with the default group
                dist.destroy_process_group(group)
        if ends_job:
            _close_all()


def _wait_for(works: Sequence[Any]) -> Callable[[], None]:
    def wait() -> None:
        for work in works:
            work.wait()

    return wait
