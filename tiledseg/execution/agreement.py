"""Agreement of the ranks on the network: buffers are averaged where they may differ, weights are checked."""

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
    """Give every rank the mean of the running statistics of the ranks with `speaks`. Collective.

    A buffer that is the same on all of them, or on one rank only (the exact case), keeps its bits: sums are float64.
    Buffers differ between ranks only if batch statistics are of tiles, which is not exact (parallel.exact false); the
    mean keeps the ranks from drifting apart.
    """
    tracking = [m for m, layer in zip(network.layers.values(), network.graph.layers, strict=True) if layer.tracks]
    buffers = [b for module in tracking for b in module.buffers() if not b.is_meta]  # meta: on another stage
    if communicator.size == 1 or not buffers:
        return
    speakers = torch.tensor(int(speaks))
    communicator.all_reduce_sum(speakers).wait()
    if not speakers:
        return
    for buffer in buffers:
        total = buffer.double() if speaks else torch.zeros_like(buffer, dtype=torch.float64)
        communicator.all_reduce_sum(total).wait()
        mean = total / int(speakers)
        buffer.copy_(mean if buffer.is_floating_point() else mean.floor())


def check_agreement(network: nn.Module, mesh: Mesh, holders: Communicator) -> None:
    """Raise TiledsegError on every rank unless all `holders` of the same layers have the same bits. Collective."""
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
    """Raise ConfigError on every rank unless the user's function `build` gave all ranks the same weights.
    Collective."""
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
    """Raise TiledsegError on every rank if a weight, or a number of the optimizer, is not finite on one. Collective.

    Called before a checkpoint is written, so that every checkpoint can be resumed. A loss that is not finite ends the
    run a step earlier; the effect of the last step shows only here.
    """
    named = list(own_state(network).items())
    for entries in optimizer.state.values():
        named += [(f"the optimizer's {name}", value) for name, value in entries.items() if torch.is_tensor(value)]
    # Sums take a sixteenth of the time of testing each value, and one wait for a GPU. A sum may overflow: test again.
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
    """Return the weights and buffers of this rank's layers, by name."""
    return {name: tensor for name, tensor in network.state_dict().items() if not tensor.is_meta}


def _digest(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in own_state(network).values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
