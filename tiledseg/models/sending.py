"""Between the host and a device without that the host waits: by pinned memory, in the order of the current stream.

A copy from pageable memory makes the host wait for the GPU. Pinned memory comes from torch's cache of it, which gives a
piece out again once the copies that read it are done.
"""

from __future__ import annotations

import functools

import torch

Numbers = tuple[float, ...]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host's tensor on the device, in one piece; on a CPU itself."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def asked_back(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, whole once the host has waited for the current stream; a host's tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@functools.lru_cache(maxsize=256)
def fixed(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers that stay the same for a run, in one dim: they go to the device once. Nobody may write to them."""
    with torch.inference_mode(False):  # made in it they could not be trained with
        return torch.tensor(values, dtype=dtype).to(device)
