"""Every rank holds the same network: kept where a layer gathers statistics, checked where weights should just agree."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, TiledsegError
from tiledseg.models.network import GraphNetwork


def agree_on_buffers(network: GraphNetwork, communicator: Communicator, speaks: bool) -> None:
    """Give every rank the mean of the running statistics of the ranks that speak. Collective.

    A buffer that all speakers have alike, or one alone has (the exact case), stays to the last bit: sums are float64.
    Several ranks have different buffers only where batch statistics are of tiles and not exact (parallel.exact false):
    there the ranks must not drift apart.
    """
    moving = [m for m, layer in zip(network.layers.values(), network.graph.layers, strict=True) if layer.tracks]
    buffers = [b for module in moving for b in module.buffers() if not b.is_meta]  # those of other stages: elsewhere
    if communicator.size == 1 or not buffers:
        return
    voices = torch.tensor(int(speaks))
    communicator.all_reduce_sum(voices).wait()
    if not voices:
        return
    for buffer in buffers:
        total = buffer.double() if speaks else torch.zeros_like(buffer, dtype=torch.float64)
        communicator.all_reduce_sum(total).wait()
        mean = total / int(voices)
        buffer.copy_(mean if buffer.is_floating_point() else mean.floor())


def check_agreement(network: nn.Module, mesh: Mesh, holders: Communicator) -> None:
    """Raise TiledsegError on every rank unless all `holders` of the same layers hold the same bits. Collective."""
    if holders.size == 1:
        return
    digests = holders.gather_objects((mesh.rank, _digest(network)))
    different = [rank for rank, digest in digests if digest != digests[0][1]]
    if different:
        raise TiledsegError(
            f"the weights of rank {different[0]} differ from those of rank {digests[0][0]}: the transport "
            f"{mesh.transport} or the hardware gave the ranks different sums; try another parallel.transport"
        )


def check_drawn_alike(network: nn.Module, mesh: Mesh, build: str) -> None:
    """Raise ConfigError on every rank unless a function of somebody's has given all the same weights. Collective."""
    digests = mesh.communicator.gather_objects(_digest(network))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise mark_agreed(
            ConfigError(
                f"{build} gives rank {other} other weights than rank 0, from one seed; let it draw them with torch, "
                "and read nothing that differs between ranks"
            )
        )


def check_finite(network: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, step: int) -> None:
    """Raise TiledsegError on every rank where one holds a weight, or a number of its optimizer, that is not finite.

    Collective; asked before a checkpoint is written, so that every one there is can be gone on from. A loss that is not
    finite has ended the run already, a step before; what the very last step did shows only here.
    """
    named = list(own_state(network).items())
    for entries in optimizer.state.values():
        named += [(f"the optimizer's {name}", value) for name, value in entries.items() if torch.is_tensor(value)]
    # The sums of all take a sixteenth of the time of looking at each, and one wait for a GPU. A sum may overflow alone.
    devices = [[t.sum().double() for _, t in named if t.device == device] for device in {t.device for _, t in named}]
    finite = all(bool(torch.stack(sums).isfinite().all()) for sums in devices)
    wrong = None if finite else next((name for name, tensor in named if not tensor.isfinite().all()), None)
    found = [name for name in mesh.communicator.gather_objects(wrong) if name is not None]
    if found:
        raise TiledsegError(
            f"{found[0]} is not finite after step {step}; its checkpoint is not written, the last good one is kept: "
            "lower optimizer.lr and run again"
        )


def own_state(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and buffers that this rank holds, by name; those of other stages have no values here."""
    return {name: tensor for name, tensor in network.state_dict().items() if not tensor.is_meta}


def _digest(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in own_state(network).values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
