"""Agreement of the ranks on the network: buffers are averaged where they may differ, weights are checked, and the parts
of stages are collected for a checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tiledseg.checkpoint.folder import Contents
from tiledseg.comm.collectives import Communicator, Message
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Axes, Mesh
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


def check_agreement(network: nn.Module, mesh: Mesh, holders: Communicator, build: str | None = None) -> None:
    """Raise TiledsegError on every rank unless all `holders` of the same layers have the same bits; ConfigError if the
    user's function `build` has just made them. Collective."""
    digests = holders.gather_objects((mesh.rank, _digest(network))) if holders.size > 1 else []
    other = next((rank for rank, digest in digests if digest != digests[0][1]), None)
    if other is None:
        return
    ranks = f"rank {other} has other weights than rank {digests[0][0]}"
    if build is not None:
        remedy = "let it draw them with torch, and read nothing that differs between ranks"
        raise mark_agreed(ConfigError(f"{ranks}, from {build} and one seed; {remedy}"))
    raise TiledsegError(
        f"{ranks}: the transport {mesh.transport} or the hardware gave the ranks different sums; try another "
        "parallel.transport"
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


def collect(own: Contents, axes: Axes) -> Contents | None:
    """Return the contents of all stages on the rank of stage 0; None on the others. Collective over a pipeline.

    No deadlock: stage 0 receives tensor by tensor in the order of stages and names, which all stages know, and the
    other stages only send, in that order.
    """
    if axes.shape.stages == 1 or axes.position is None:
        return own
    named = {(file, name): tensor for file, tensors in own.items() for name, tensor in tensors.items()}
    heads = axes.pipeline.gather_objects([(key, tensor.shape, tensor.dtype) for key, tensor in named.items()])
    if axes.position.stage > 0:
        for tensor in named.values():
            axes.stage_messages.start([Message(axes.rank_of_stage(0), tensor)], []).wait()
        return None
    for stage, theirs in enumerate(heads[1:], start=1):
        for key, shape, dtype in theirs:
            named[key] = torch.empty(shape, dtype=dtype)
            axes.stage_messages.start([], [Message(axes.rank_of_stage(stage), named[key])]).wait()
    whole: Contents = {file: {} for file in own}
    for (file, name), tensor in named.items():
        whole.setdefault(file, {})[name] = tensor
    return whole


def own_state(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of this rank's layers, by name."""
    return {name: tensor for name, tensor in network.state_dict().items() if not tensor.is_meta}


def _digest(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in own_state(network).values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
