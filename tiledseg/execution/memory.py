"""The memory that a rank may plan with, and that it has held."""

from __future__ import annotations

import os
import resource

import torch

from tiledseg.architecture.network import Network
from tiledseg.comm.mesh import Mesh, gather_facts
from tiledseg.errors import ConfigError
from tiledseg.geometry.shapes import count_parameters
from tiledseg.memory.device import api, free_bytes, is_gpu
from tiledseg.system.freed_memory import available_bytes, why_not_kept
from tiledseg.units import ACTIVATION_BYTES, wide_bytes

_SHARE = 0.6  # share of free memory for tensors; the rest is for the raster cache, the interpreter and fragmentation
# Kept freed memory of a host is fragmented: a run holds 1.13 to 1.22 times as much, measured (decision 0012).
_KEPT_OVER_RETURNED = 1.25


def memory_per_rank(mesh: Mesh) -> int:
    """Return the bytes that every rank may plan with: the least of the ranks' shares of free memory. Collective.

    A GPU's free memory is divided among the ranks on that GPU, a host's among the ranks on that host.
    """
    facts = gather_facts(mesh.communicator, mesh.device, mesh.host)
    own = facts[mesh.rank]
    sharing = sum((fact.host, fact.gpu) == (own.host, own.gpu) for fact in facts)
    return min(mesh.communicator.gather_objects(int(_free_memory(mesh.device) * _SHARE / sharing)))


def free_memory(mesh: Mesh, device: torch.device) -> int:
    """Return the bytes that this rank may fill on a device: its part of the memory free now. Does not communicate."""
    return int(_free_memory(device) * _SHARE / mesh.launch.local_size)


def _free_memory(device: torch.device) -> int:
    """Return the bytes of the GPU or the host that tensors may still take."""
    if is_gpu(device):
        return free_bytes(device)
    free = available_bytes()
    return free if why_not_kept(os.environ) else int(free / _KEPT_OVER_RETURNED)


def check_weights(network: Network, copies: int, precision: str, mesh: Mesh) -> None:
    """Raise ConfigError if the host cannot hold `copies` of the weights for each of its ranks.

    Every rank builds the whole network before it knows its part. The limit is the host's total memory, free or not: a
    refused network could never be trained.
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
    """Reset the peak of a GPU for `peak_memory`. The peak of a process's resident set cannot be reset."""
    if is_gpu(device):
        api(device).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has held: of its GPU since `reset_peak`, else its peak resident set."""
    if is_gpu(device):
        return api(device).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
