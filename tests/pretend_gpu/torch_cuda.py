"""torch.cuda and NCCL over the pretend device, and the report of a process that the harness reads (`harness.py`)."""

import atexit
import collections
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.pretend_gpu.device import COUNT, gpu, native, torch  # before torch.distributed

import torch.distributed as dist  # isort: skip

_PROCESS, _exit, _accelerator = os.getpid(), os._exit, torch.accelerator
_RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
# PRETEND_GPU_ALONE: a launcher shows each rank one GPU, another one, as its first.
_SEEN_AS = _RANK if "PRETEND_GPU_ALONE" in os.environ else "shared"


def write_report() -> None:
    """Write what the process did on its GPUs."""
    if os.getpid() == _PROCESS:
        waits = [[kind, where, count] for (kind, where), count in gpu.waits.most_common()]
        report = {"races": sorted(set(gpu.races)), "waits": waits, "contexts": dict(sorted(gpu.contexts.items()))}
        report["launches"] = sum(clock[stream] for stream, clock in gpu.clocks.items())
        Path(os.environ["PRETEND_GPU_REPORTS"], f"{_RANK}-{_PROCESS}.json").write_text(json.dumps(report))


def _end() -> None:
    """Wait for torch's backward threads: one that frees its objects while the interpreter ends aborts it (3.11)."""
    write_report()
    time.sleep(0.1 if gpu.contexts else 0)
    native.disconnect()


os._exit = lambda code: (write_report(), _exit(code))  # type: ignore[assignment, func-returns-value]
atexit.register(_end)


def _index(given: Any = None) -> int:
    index = given if given is None or isinstance(given, int) else torch.device(given).index
    return _accelerator.current_device_index() if index is None or index < 0 else index


def set_device(given: Any) -> None:
    """Make a device current as CUDA 12's runtime does: its context is made at once."""
    gpu.take_context(_index(given))
    _accelerator.set_device_index(_index(given))


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current, and its device, as torch.cuda does."""
    if _accelerator.current_device_index() != stream.device_index:
        set_device(stream.device_index)
    _accelerator.set_stream(stream)


def _allocated(given: Any = None) -> int:
    gpu.answer("is_pinned", 0)  # what was freed before is counted
    return gpu.allocated[_index(given)]


Properties = collections.namedtuple("Properties", "uuid total_memory name major minor multi_processor_count")
TOTAL, NAME = 8 << 30, "pretend GPU"
# Each a function of its own, since torch.compile knows them by what they are.
FUNCTIONS: dict[str, Any] = {
    **{name: lambda *_: None for name in ("_lazy_init", "_sleep", "manual_seed_all")},
    **{name: lambda *_: True for name in ("is_available", "is_bf16_supported")},
    **{
        name: lambda at: torch._C._accelerator_exchangeDevice(at)
        for name in ("_exchange_device", "_maybe_exchange_device")
    },
    **{name: lambda given=None: _allocated(given) for name in ("memory_allocated", "memory_reserved")},
    "Event": lambda enable_timing=False: torch.Event("cuda", enable_timing=enable_timing),
    "Stream": lambda given=None: torch.Stream(torch.device("cuda", _index(given))),
    "current_device": lambda: _index(),
    "current_stream": lambda given=None: _accelerator.current_stream(_index(given)),
    "device_count": lambda: COUNT,
    "get_device_name": lambda given=None: NAME,
    "get_device_properties": lambda at=None: Properties(f"{_SEEN_AS}-{_index(at)}", TOTAL, NAME, 9, 0, 132),
    "max_memory_allocated": lambda given=None: gpu.peak[_index(given)],
    "mem_get_info": lambda given=None: (TOTAL - _allocated(given), TOTAL),
    "reset_peak_memory_stats": lambda given=None: gpu.peak.__setitem__(_index(given), _allocated(given)),
    "set_device": set_device,
    "set_stream": set_stream,
    "synchronize": lambda given=None: gpu.answer("synchronize"),
}
for _name, _function in FUNCTIONS.items():
    setattr(torch.cuda, _name, _function)
torch.cuda.nccl.version = lambda: (2, 27, 5)  # type: ignore[assignment, return-value]
torch._C._cuda_isCurrentStreamCapturing = lambda: False  # type: ignore[attr-defined]
torch.UntypedStorage.clone = lambda own: (  # type: ignore[method-assign]
    torch.empty(0, dtype=torch.uint8, device=own.device).set_(own).clone().untyped_storage()
)
_line, _batch = ThreadPoolExecutor(1, "pretend NCCL"), dist.batch_isend_irecv
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
    """NCCL's group, as far as it is used: sums, broadcasts, and batches of messages. Gloo carries the bytes.

    Operations of all groups run strictly in the order in which the process starts them, each until its peers have run
    theirs, as NCCL's may: ranks that start them in other orders stand still. To streams they are work on a stream of
    the group's own, which `wait` orders before the stream that waits.
    """

    Options, group_name, supports_splitting = type("Options", (), {}), "", False  # what torch sets for NCCL, and asks

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._stream = torch.cuda.Stream()

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _get_backend(self, device: torch.device) -> "PretendNccl":
        return self

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


dist.batch_isend_irecv = lambda moves: (
    [moves[0].group.batch(moves)] if isinstance(moves[0].group, PretendNccl) else _batch(moves)
)
dist.distributed_c10d._NCCL_AVAILABLE = True
dist.distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = PretendNccl
