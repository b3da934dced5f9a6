"""A rank's device, and the ways between it and the host: no other file names the API of a GPU's maker.

CUDA, ROCm (CUDA's API in torch) and XPU have streams: their work goes on when the host has left it. A CPU has none.
MPS, and GPUs of XPU without float64, are passed over: sums of losses, gradients and norms are float64.

A copy from pageable memory makes the host wait for the GPU. Copies through pinned memory run in the order of the
current stream. torch's cache gives a piece of pinned memory out again once the copies that read it are done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Numbers = tuple[float, ...]
CPU = torch.device("cpu")
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # what carries tensors between GPUs; RCCL has NCCL's name in torch


def api(device: torch.device) -> Any:
    """Return torch's module of a kind of GPU: torch.cuda, torch.xpu."""
    return torch.get_device_module(device)


def is_gpu(device: torch.device) -> bool:
    """Return True for a device with streams, whose work goes on when the host has left it."""
    return device.type in BACKENDS


def kind_here() -> torch.device:
    """Return a device of the kind that ranks compute on here, without an index."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not is_gpu(kind) or (kind.type == "xpu" and not api(kind).get_device_properties().has_fp64):
        return CPU
    return kind


def local_device(local_rank: int) -> torch.device:
    """Return a rank's GPU, `local_rank % device_count` (0 for all with one visible GPU a rank), else the CPU."""
    kind = kind_here()
    return torch.device(kind.type, local_rank % api(kind).device_count()) if is_gpu(kind) else kind


def name_of(device: torch.device) -> str | None:
    """Return the name of a GPU's model, None for a CPU."""
    return api(device).get_device_name(device) if is_gpu(device) else None


def identity(device: torch.device) -> str | None:
    """Return what names a GPU alike in all processes of its host, whatever number each gives it; None for a CPU."""
    return str(getattr(api(device).get_device_properties(device), "uuid", device)) if is_gpu(device) else None


def free_bytes(device: torch.device) -> int:
    """Return the bytes that tensors of this process may still take of a GPU: free ones, and its allocator's store."""
    own = api(device)
    return int(own.mem_get_info(device)[0] + own.memory_reserved(device) - own.memory_allocated(device))


def versions() -> dict[str, str]:
    """Return the versions of the libraries by which torch reaches the GPUs here."""
    kind = kind_here()
    found = {maker: getattr(torch.version, maker, None) for maker in ("cuda", "hip", "xpu") if is_gpu(kind)}
    if kind.type == "cuda":
        found["nccl"] = ".".join(map(str, api(kind).nccl.version()))
    return {library: str(version) for library, version in found.items() if version}


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host's tensor on the device, in one piece; on a CPU itself."""
    if not is_gpu(device):
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def asked_back(*tensors: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    """Begin to copy tensors of one device into pinned memory. Return a function that has the host wait for the copies
    and returns them; a CPU's tensors are handed on."""
    device = tensors[0].device
    if not is_gpu(device):
        return lambda: tensors
    pinned = (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    copies = [host.copy_(tensor, non_blocking=True) for host, tensor in zip(pinned, tensors, strict=True)]
    event = api(device).current_stream(device).record_event()
    return lambda: event.synchronize() or copies


@functools.lru_cache(maxsize=256)
def fixed(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers that stay the same for a run, in one dim: they go to the device once. Nobody may write to them."""
    with torch.inference_mode(False):  # made in it they could not be trained with
        return torch.tensor(values, dtype=dtype).to(device)
