"""Every rank holds the same network: kept where a layer gathers statistics, checked where weights should just agree."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import TiledsegError


def average_buffers(network: nn.Module, communicator: Communicator) -> None:
    """Average floating-point buffers (running statistics of batch norm) over the ranks. Collective.

    Batch statistics of tiles are not exact (parallel.exact false), but the ranks must not drift apart.
    """
    if communicator.size == 1:
        return
    for buffer in network.buffers():
        if buffer.is_floating_point():
            communicator.all_reduce_sum(buffer).wait()
            buffer /= communicator.size


def check_agreement(network: nn.Module, mesh: Mesh) -> None:
    """Raise TiledsegError on every rank unless all hold the same bits. Collective."""
    digests = mesh.communicator.gather_objects(_digest(network))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise TiledsegError(
            f"the weights of rank {different[0]} differ from those of rank 0: the transport {mesh.transport} or the "
            "hardware gave the ranks different sums; try another parallel.transport"
        )


def _digest(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
