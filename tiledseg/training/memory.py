"""How much memory a rank may plan with, and how much it has held."""

from __future__ import annotations

import os
import resource

import torch

from tiledseg.comm.mesh import Mesh, gather_facts

_SHARE = 0.6  # of what is free: the rest is for the raster cache, the interpreter and fragmentation


def memory_per_rank(mesh: Mesh) -> int:
    """Bytes that every rank may plan with: the least of their parts of what is free. Collective.

    A GPU's free memory is divided among the ranks on that GPU, whatever number each calls it by; a host's among the
    ranks on that host.
    """
    facts = gather_facts(mesh.communicator, mesh.device, mesh.host)
    own = facts[mesh.rank]
    sharing = sum((fact.host, fact.gpu) == (own.host, own.gpu) for fact in facts)
    return min(mesh.communicator.gather_objects(int(_free_memory(mesh.device) * _SHARE / sharing)))


def _free_memory(device: torch.device) -> int:
    """Bytes that nobody holds now: of the GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """The largest memory this rank has held: GPU memory allocated, or the process's resident set. Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
