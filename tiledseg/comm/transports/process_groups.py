"""The process groups of torch.distributed over one set of ranks: made with what every promised torch version knows."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist

# No time limit of torch's own: the watch ends a job that stands still, with a line that names the rank, and lets one
# rank write or validate for as long as it makes progress. A year, since torch wants a number.
COLLECTIVE_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """The process groups over `ranks`, which are those of the job in the communicator's own order.

    `host` is Gloo's, for CPU tensors and objects. `gpu` carries GPU tensors: NCCL's group, or `host` itself, and then
    their messages go through host memory. None of them is None: torch takes None for the whole job, so that a sum over
    a part would silently be one over all. NCCL's group carries sums and messages alike: on every rank they start in one
    common order (docs/explanation/communication.md), so that one communicator is enough.
    """

    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    gpu: dist.ProcessGroup

    @property
    def with_nccl(self) -> bool:
        return self.gpu is not self.host

    def carrier(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.gpu if tensor.is_cuda else self.host

    def in_order(self, values: Sequence[object]) -> list[object]:
        """Return values in the order of torch's ranks, which ascend, in the order of `ranks`."""
        places = {rank: place for place, rank in enumerate(sorted(self.ranks))}
        return [values[places[rank]] for rank in self.ranks]

    def __post_init__(self) -> None:
        _LIVING.add(self)

    def destroy(self) -> None:
        if self.with_nccl:
            dist.destroy_process_group(self.gpu)
        dist.destroy_process_group(self.host)


_LIVING: WeakSet[ProcessGroups] = WeakSet()
_OWN_DEFAULT: WeakSet[dist.ProcessGroup] = WeakSet()


def close_at_exit(owns_default: bool) -> None:
    """Have the program's exit end the groups that were made here, and with `owns_default` the default group of now.

    A thread of Gloo's that still frees its last tensor while the interpreter goes aborts the process. A group's
    destructor waits for its threads, and runs once nothing refers to the group. Nothing is sent: no rank waits for
    another one, which may be gone.
    """
    if owns_default and dist.group.WORLD is not None:
        _OWN_DEFAULT.add(dist.group.WORLD)
    atexit.unregister(_close)
    atexit.register(_close)  # after all others, so that it runs before them


def _close() -> None:
    made = {group for groups in _LIVING for group in (groups.host, groups.gpu)}
    for groups in _LIVING:
        vars(groups).clear()
    default = dist.group.WORLD if dist.is_initialized() else None
    if default in _OWN_DEFAULT:
        dist.destroy_process_group()
    for group in made - {default}:
        with contextlib.suppress(ValueError):  # closed before
            dist.destroy_process_group(group)


def whole_job() -> ProcessGroups:
    """Return the groups of all ranks of the job over the default group, which is Gloo's and must have been started."""
    everyone = dist.group.WORLD
    assert everyone is not None, "the process group is started before its communicator"
    return ProcessGroups(tuple(range(dist.get_world_size())), everyone, everyone)


def new_groups(ranks: Sequence[int], with_nccl: bool) -> ProcessGroups | None:
    """Make groups over `ranks` of the job, in this order. Return None on a rank that is not among them.

    Collective over the whole job, in one order, but no rank waits here for another. A rank that is not a member does
    not even talk to the store (30 us a group), and members connect at their first message. A group of torch counts its
    ranks in ascending order, whatever the order given (only the newest versions know `sort_ranks=False`). Messages and
    broadcasts therefore name the ranks of the job.
    """
    host = _new_group(ranks, "gloo")
    gpu = _new_group(ranks, "nccl") if with_nccl else host
    if dist.get_rank() not in ranks:
        return None
    return ProcessGroups(tuple(ranks), host, gpu)


def nccl_beside_gloo(device: torch.device) -> ProcessGroups:
    """Make NCCL's group of all ranks for GPU tensors; Gloo's, the default, has objects and CPU tensors. Collective."""
    whole = whole_job()
    gpu = dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    return ProcessGroups(whole.ranks, whole.host, gpu)


def _new_group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """Return a new group; on a rank that is not among `ranks` torch's mark of a stranger, which is of no use."""
    return dist.new_group(list(ranks), backend=backend, timeout=COLLECTIVE_TIMEOUT)
