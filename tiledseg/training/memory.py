"""How much memory a rank may plan with, and how much it has held."""

from __future__ import annotations

import os
import resource

import torch

from tiledseg.comm.mesh import Mesh

_SHARE = 0.6  # of what is free: the rest is for the raster cache, the interpreter and fragmentation


def memory_per_rank(mesh: Mesh) -> int:
    """Bytes that one rank may plan with: of its GPU's free memory, or of its part of the node's available memory."""
    if mesh.device.type == "cuda":
        return int(torch.cuda.mem_get_info(mesh.device)[0] * _SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * _SHARE / mesh.launch.local_size)


def peak_memory(device: torch.device) -> int:
    """The largest memory this rank has held: GPU memory allocated, or the process's resident set. Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
