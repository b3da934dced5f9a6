"""The memory that a rank may plan with, and that it has held."""

from __future__ import annotations

import os
import resource

import torch

from tiledseg.architecture.network import Network
from tiledseg.comm.mesh import Mesh, gather_facts
from tiledseg.errors import ConfigError
from tiledseg.geometry.shapes import count_parameters
from tiledseg.memory.device import CPU, api, free_bytes, is_gpu
from tiledseg.system.freed_memory import available_bytes, why_not_kept
from tiledseg.units import ACTIVATION_BYTES, wide_bytes

_SHARE = 0.6  # of what is free: the rest is for the raster cache, the interpreter and fragmentation
# A host's memory that is kept when it is freed lies in pieces: 1.13 to 1.22 times as much, measured (decision 0012).
_KEPT_OVER_RETURNED = 1.25


def memory_per_rank(mesh: Mesh) -> int:
    """Return the bytes that every rank may plan with: the least of their parts of what is free. Collective.

    A GPU's free memory is divided among the ranks on that GPU, whatever number each calls it by; a host's among the
    ranks on that host.
    """
    facts = gather_facts(mesh.communicator, mesh.device, mesh.host)
    own = facts[mesh.rank]
    sharing = sum((fact.host, fact.gpu) == (own.host, own.gpu) for fact in facts)
    return min(mesh.communicator.gather_objects(int(_free_memory(mesh.device) * _SHARE / sharing)))


def free_memory(mesh: Mesh, device: torch.device) -> int:
    """Return the bytes that this rank may fill on a device: its part of what is free now. No message."""
    return int(_free_memory(device) * _SHARE / mesh.launch.local_size)


def _free_memory(device: torch.device) -> int:
    """Return the bytes that tensors may take of what nobody holds now, of the GPU or of the host."""
    if is_gpu(device):
        return free_bytes(device)
    free = available_bytes()
    return free if why_not_kept(os.environ) else int(free / _KEPT_OVER_RETURNED)


def host_memory() -> int:
    """Return the bytes of the host that a rank may fill which alone on it wants some, whatever its device."""
    return int(_free_memory(CPU) * _SHARE)


def check_weights(network: Network, copies: int, precision: str, mesh: Mesh) -> None:
    """Raise ConfigError where the host cannot hold the weights of its ranks, `copies` of each, whatever the tiles.

    Every rank builds the whole network before it knows its part. Counted against all of the host's memory, free or
    not: a network that is refused could not have been trained.
    """
    parameters = count_parameters(network.graph(), network.bands)
    ranks = mesh.launch.local_size
    needed = parameters * copies * wide_bytes(ACTIVATION_BYTES[precision]) * ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"the model has {parameters:.3g} parameters, with which {ranks} ranks fill {needed / 1e9:.4g} GB, but the "
            f"host has {memory / 1e9:.4g} GB; use fewer model.base_channels or model.levels, or a smaller model.kernel"
        )


def reset_peak(device: torch.device) -> None:
    """Forget what a GPU held before, in `peak_memory`; a process's resident set cannot."""
    if is_gpu(device):
        api(device).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the bytes that this rank has held at most: of its GPU since `reset_peak`, or its resident set."""
    if is_gpu(device):
        return api(device).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
