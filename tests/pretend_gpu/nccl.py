"""A process group under NCCL's name for tensors of the pretend GPU.

Operations of all groups run strictly in the order in which the process starts them, each until its peers have run
theirs, as NCCL's may: ranks that start them in other orders stand still. To streams they are work on a stream of the
group's own, which `wait` orders before the stream that waits. Gloo carries the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.pretend_gpu.device import gpu, native

_line = ThreadPoolExecutor(1, "pretend NCCL")
_batch = dist.batch_isend_irecv
Tensors = Sequence[torch.Tensor]


class Work:
    """A started operation. It keeps its tensors until it is waited for, as torch does."""

    def __init__(self, tensors: Tensors, event: torch.Event, future: Future[Any]) -> None:
        self._tensors, self._event, self._future = tensors, event, future

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait. The pretend kernels after it run at once, so that the host waits too, unseen."""
        self._event.wait(torch.cuda.current_stream())
        self._future.result()
        self._tensors = ()
        return True


class PretendNccl(dist.ProcessGroup):
    """NCCL's group, as far as it is used: sums, broadcasts, and batches of messages."""

    Options = type("Options", (), {})  # what torch sets for NCCL
    supports_splitting, group_name = False, ""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._stream = torch.cuda.Stream()

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _get_backend(self, device: torch.device) -> PretendNccl:
        return self

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "nccl"

    def shutdown(self) -> None:
        _line.submit(int).result()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._start("all-reduce", tensors, tensors, lambda hosts: [self._gloo.allreduce(hosts, options)])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        written = tensors if options.rootRank != self.rank() else ()
        return self._start("broadcast", tensors, written, lambda hosts: [self._gloo.broadcast(hosts, options)])

    def batch(self, operations: Sequence[dist.P2POp]) -> Work:
        """Start messages as a whole, in whatever order they stand."""
        ordered = sorted(operations, key=lambda each: each.op is not dist.isend)  # sends first

        def post(hosts: list[torch.Tensor]) -> list[Any]:
            moves = [self._gloo.send if each.op is dist.isend else self._gloo.recv for each in ordered]
            return [move([host], each.group_peer, 0) for move, host, each in zip(moves, hosts, ordered, strict=True)]

        received = [each.tensor for each in ordered if each.op is not dist.isend]
        return self._start("messages", [each.tensor for each in ordered], received, post)

    def _start(self, name: str, tensors: Tensors, writes: Tensors, post: Callable[[list[Any]], list[Any]]) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                assert tensor.is_contiguous(), "NCCL takes whole tensors"
                assert tensor.device == self._stream.device, f"{tensor.device} on a rank of {self._stream.device}"
                gpu.answer("note_outside", tensor, any(tensor is each for each in writes), f"nccl {name}")
        hosts = [native.on_host(tensor) for tensor in tensors]
        return Work(tensors, self._stream.record_event(), _line.submit(lambda: [work.wait() for work in post(hosts)]))


def _batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
    group = operations[0].group
    return [group.batch(operations)] if isinstance(group, PretendNccl) else _batch(operations)


dist.batch_isend_irecv = _batch_isend_irecv
distributed_c10d._NCCL_AVAILABLE = True
distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = PretendNccl
