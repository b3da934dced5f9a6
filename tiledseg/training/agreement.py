"""Every rank holds the same network: kept where a layer gathers statistics, checked where weights should just agree."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import TiledsegError


def agree_on_buffers(network: nn.Module, communicator: Communicator, speaks: bool) -> None:
    """Give every rank the mean of the buffers (running statistics of batch norm) of the ranks that speak. Collective.

    Where one rank speaks for all, which is the exact case, that is its own to the last bit. Several speak where the
    batch statistics are of tiles and not exact (parallel.exact false): there the ranks must not drift apart.
    """
    buffers = list(network.buffers())
    if communicator.size == 1 or not buffers:
        return
    voices = torch.tensor(int(speaks))
    communicator.all_reduce_sum(voices).wait()
    if not voices:
        return
    for buffer in buffers:
        if not speaks:
            buffer.zero_()
        communicator.all_reduce_sum(buffer).wait()
        if buffer.is_floating_point():
            buffer /= int(voices)
        else:
            buffer.div_(int(voices), rounding_mode="floor")


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
