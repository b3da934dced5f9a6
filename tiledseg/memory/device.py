"""A rank's device, copies between it and the host, and the differences between supported versions of torch.

No other file names the API of a GPU's maker.

CUDA, ROCm (CUDA's API in torch) and XPU have streams: kernels run asynchronously. A CPU has none. MPS, and XPU GPUs
without float64, are not used: sums of losses, gradients and norms are float64.

A copy from pageable memory makes the host wait for the GPU. Copies through pinned memory run in the order of the
current stream. torch's cache reuses a piece of pinned memory once the copies that read it are done.

| versions of torch, 2.8 to 2.15 | difference | met by |
| --- | --- | --- |
| before 2.8 | Gloo's destructor holds the interpreter: ranks hang at their end | `check_version`, a refusal |
| 2.8 (not from 2.13 on) | Gloo prints lines about its peers on standard output as a group is made | `gloo_connects` |
| 2.8 (not from 2.13 on) | no backward pass starts from an operation in Python | a view, in `pipeline.chunk` |
| 2.8 to 2.11 | `checkpoint` reads `grad_fn` of a tensor of its own | `tracing.record`, in `_check_function` |
| to 2.13 | a GPU's gradient of padded average pooling in channels_last (pytorch#188344) | `models.layers.pooling` |

A `Stopwatch` measures by the clock on a CPU, by events on a GPU: a wait for NCCL, which stops only the stream, is
measured too. The host waits for no event until the seconds are read.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tiledseg.errors import ConfigError
from tiledseg.system.console import keep_descriptors

Numbers = tuple[float, ...]
CPU = torch.device("cpu")
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # transports between GPUs; torch calls RCCL "nccl" too
OLDEST = 2, 8
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
_QUIET_GLOO = 2, 13


def api(device: torch.device) -> Any:
    """Return torch's module for a kind of GPU: torch.cuda or torch.xpu."""
    return torch.get_device_module(device)


def is_gpu(device: torch.device) -> bool:
    """Return True for a device with streams, which runs kernels asynchronously."""
    return device.type in BACKENDS


def kind_here() -> torch.device:
    """Return the kind of device that ranks compute on here, without an index."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not is_gpu(kind) or (kind.type == "xpu" and not api(kind).get_device_properties().has_fp64):
        return CPU
    return kind


def local_device(local_rank: int) -> torch.device:
    """Return a rank's GPU, number `local_rank % device_count` (0 if each rank sees one GPU), else the CPU."""
    kind = kind_here()
    return torch.device(kind.type, local_rank % api(kind).device_count()) if is_gpu(kind) else kind


def name_of(device: torch.device) -> str | None:
    """Return the name of a GPU's model, None for a CPU."""
    return api(device).get_device_name(device) if is_gpu(device) else None


def identity(device: torch.device) -> str | None:
    """Return an identifier of a GPU that is the same in all processes of its host; None for a CPU."""
    return str(getattr(api(device).get_device_properties(device), "uuid", device)) if is_gpu(device) else None


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may still allocate: free ones, and those its allocator caches."""
    own = api(device)
    return int(own.mem_get_info(device)[0] + own.memory_reserved(device) - own.memory_allocated(device))


def versions() -> dict[str, str]:
    """Return the versions of the GPU libraries that torch uses here."""
    kind = kind_here()
    found = {maker: getattr(torch.version, maker, None) for maker in ("cuda", "hip", "xpu") if is_gpu(kind)}
    if kind.type == "cuda":
        found["nccl"] = ".".join(map(str, api(kind).nccl.version()))
        found["torch's cards"] = " ".join(torch.cuda.get_arch_list())
    return {library: str(version) for library, version in found.items() if version}


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device, contiguous, through pinned memory. A CPU's tensor is returned itself."""
    if not is_gpu(device):
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def asked_back(*tensors: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """Start to copy tensors of one GPU, or of it and the CPU, into pinned memory. Return a function that waits for the
    copies and returns them; without a GPU it returns the tensors themselves."""
    device = next((tensor.device for tensor in tensors if is_gpu(tensor.device)), CPU)
    if not is_gpu(device):
        return lambda: tensors
    pinned = (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    copies = [host.copy_(tensor, non_blocking=True) for host, tensor in zip(pinned, tensors, strict=True)]
    event = api(device).current_stream(device).record_event()
    return lambda: event.synchronize() or copies


@functools.lru_cache(maxsize=256)
def fixed(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return constants of a run as a tensor of one dim, copied to the device once. Callers must not write to it."""
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be used in training
        return torch.tensor(values, dtype=dtype).to(device)


def check_version() -> None:
    """Raise ConfigError for a torch older than the supported versions."""
    if _VERSION < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"torch {torch.__version__} is too old, its ranks hang; pip install 'torch>={oldest}'")


@contextmanager
def gloo_connects() -> Iterator[None]:
    """Redirect standard output to standard error inside: Gloo's lines would stand in a command's answer."""
    if _VERSION >= _QUIET_GLOO:
        yield
        return
    keep_descriptors()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


_MOST_SPANS = 4096  # unread spans of a watch, which reads them then: a long run holds no more events

Mark = Any  # seconds of the clock, or a GPU's event


def mark(device: torch.device) -> Mark:
    """Return the moment at which the device has finished its present work, without waiting."""
    if not is_gpu(device):
        return time.perf_counter()
    return api(device).current_stream(device).record_event(api(device).Event(enable_timing=True))


def between(begin: Mark, end: Mark) -> float:
    """Return the seconds from one mark to a later one; wait until the device has reached it."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class Stopwatch:
    """The total time of the blocks under `running`; waits for the device only in `seconds`."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Mark, Mark]] = []

    @contextmanager
    def running(self, device: torch.device | None = None) -> Iterator[None]:
        """Measure the work started inside, on `device` or else the watch's own."""
        begin = mark(device or self._device)
        yield
        self._spans.append((begin, mark(device or self._device)))
        if len(self._spans) >= _MOST_SPANS:
            self.seconds()

    def seconds(self) -> float:
        """Return the seconds so far. Waits for the device."""
        for begin, end in reversed(self._spans):  # the last first: then no other needs a wait
            self._seconds += between(begin, end)
        self._spans = []
        return self._seconds


def least(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of the quickest of five calls, after one warm-up."""
    watch, seconds = Stopwatch(device), []
    for _ in range(6):
        watch.reset()
        with watch.running():
            call()
        seconds.append(watch.seconds())
    return min(seconds[1:])
