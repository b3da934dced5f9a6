"""Collectives over torch.distributed: Gloo for CPU tensors and Python objects, NCCL for GPU tensors where asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tiledseg.comm.collectives import DoneWork, Work, as_bytes, check_source, sum_dtype
from tiledseg.errors import CommunicationError


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turns torch's RuntimeError of a broken collective into CommunicationError with the first line of its message.

    Without the source file of torch's own that the line may begin with.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = re.sub(r"^\[[^\]]*\]\s*", "", first_line)
        raise CommunicationError(f"{what} failed, a peer may be lost: {reason}") from error


@dataclass(frozen=True)
class TorchWork:
    """A sum under way in `staged`, which is `tensor` itself wherever no copy was needed."""

    work: Any
    staged: torch.Tensor
    tensor: torch.Tensor

    def wait(self) -> None:
        """Returns once `tensor` holds the sum; on a GPU, once the current stream will see it."""
        with peer_errors("all-reduce"):
            self.work.wait()
        if self.staged.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(self.staged)


class TorchCommunicator:
    """All ranks of the default process group, which is Gloo's; GPU tensors go to `gpu_group` where there is one."""

    def __init__(self, gpu_group: dist.ProcessGroup | None = None) -> None:
        self._gpu_group = gpu_group
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """As the protocol says. Gloo and NCCL reduce each piece on one rank and copy it to the others: equal bits."""
        staged = tensor.detach().to(sum_dtype(tensor)).contiguous()
        if tensor.numel() == 0:
            return DoneWork()
        with peer_errors("all-reduce"):
            return TorchWork(dist.all_reduce(staged, group=self._group(tensor), async_op=True), staged, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """As the protocol says."""
        check_source(source, self.size)
        if tensor.numel() == 0:
            return
        staged = tensor.detach().contiguous()
        with peer_errors("broadcast"):
            dist.broadcast(as_bytes(staged), src=source, group=self._group(tensor))
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """As the protocol says; always over Gloo."""
        check_source(source, self.size)
        box = [value if self.rank == source else None]
        with peer_errors("broadcast"):
            dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """As the protocol says; always over Gloo."""
        values: list[Any] = [None] * self.size
        with peer_errors("gather"):
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """As the protocol says. The sum of nothing: a barrier of NCCL's would need a device to be chosen."""
        with peer_errors("barrier"):
            dist.all_reduce(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        """Waits for all ranks, since rank 0 may hold the store that the others still talk to, and ends the groups."""
        self.barrier()
        dist.destroy_process_group()

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._gpu_group if tensor.is_cuda else None
