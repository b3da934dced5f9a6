r"""DistDL's distributed layers against torch's: equality and time.

    PYTHONPATH=<distdl>/src mpirun -n 4 python -m benchmarks.spatial.peers.distdl_layers \
        --workload unet --mesh 2 2

<distdl> is a checkout of github.com/distdl/distdl with its extension built (`python setup.py build_ext --inplace`).
Its convolution, max pooling and upsampling layers take the place of torch's. It has no transposed convolution: that of
kernel 2 and stride 2 sees no neighbour, so it is torch's own, its weights spread by DistDL's Broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI  # before torch: it starts MPI

import torch  # isort: skip
from torch import nn  # isort: skip

from benchmarks.measurement import not_runnable
from benchmarks.spatial.request import (
    compare,
    median_seconds,
    parse_request,
    replace_layers,
    report,
)
from benchmarks.spatial.workload import (
    Gradients,
    assemble,
    block_of,
    loss_of,
    make_input,
    make_loss_weights,
    make_network,
)

# DistDL (2022) uses an alias that NumPy 1.24 removed; it stands for the built-in type.
np.int = int  # type: ignore[attr-defined]

try:
    import distdl.nn
    from distdl.backends.mpi.partition import MPIPartition
    from distdl.utilities.torch import zero_volume_tensor
except ImportError as error:
    not_runnable(error)


class BroadcastTransposedConv2d(nn.Module):
    """torch's transposed convolution with kernel = stride; the weights live on rank 0, as in DistDL's own layers."""

    def __init__(self, partition: Any, layer: nn.ConvTranspose2d) -> None:
        super().__init__()
        if layer.kernel_size != layer.stride:
            raise ValueError(f"kernel {layer.kernel_size} is not the stride {layer.stride}: it would need a halo")
        if layer.bias is None:
            raise ValueError("a transposed convolution without bias is not needed by any workload; give it one")
        root = partition.create_partition_inclusive([0]).create_cartesian_topology_partition([1])
        self.stride = layer.stride
        if root.active:
            self.weight, self.bias = nn.Parameter(layer.weight.detach()), nn.Parameter(layer.bias.detach())
        else:
            self.register_buffer("weight", zero_volume_tensor(requires_grad=True))
            self.register_buffer("bias", zero_volume_tensor(requires_grad=True))
        self.spread_weight = distdl.nn.Broadcast(root, partition, preserve_batch=False)
        self.spread_bias = distdl.nn.Broadcast(root, partition, preserve_batch=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        weight, bias = self.spread_weight(self.weight), self.spread_bias(self.bias)
        return nn.functional.conv_transpose2d(x_BCHW, weight, bias, stride=self.stride)


def distributed_twin(partition: Any, layer: nn.Module) -> nn.Module:
    """DistDL's layer for one of torch's, with the same weights."""
    match layer:
        case nn.Conv2d():
            return _convolution(partition, layer)
        case nn.ConvTranspose2d():
            return BroadcastTransposedConv2d(partition, layer)
        case nn.MaxPool2d():
            return distdl.nn.DistributedMaxPool2d(partition, kernel_size=layer.kernel_size, stride=layer.stride)
        case nn.Upsample():
            mode = {"nearest": "nearest", "bilinear": "linear"}[layer.mode]
            align = bool(layer.align_corners)
            return distdl.nn.DistributedUpsample(
                partition, scale_factor=layer.scale_factor, mode=mode, align_corners=align
            )
        case nn.LeakyReLU():
            # Its halo exchange writes into its input, which an activation in place has saved for its backward.
            return nn.LeakyReLU(layer.negative_slope)
    return layer


def _convolution(partition: Any, layer: nn.Conv2d) -> nn.Module:
    twin = distdl.nn.DistributedConv2d(
        partition,
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        bias=layer.bias is not None,
    )
    with torch.no_grad():
        for name, tensor in layer.named_parameters():
            if isinstance(getattr(twin, name), nn.Parameter):  # rank 0 holds them
                getattr(twin, name).copy_(tensor)
    return twin


def main() -> None:
    world = MPI.COMM_WORLD
    request = parse_request(__doc__ or "", world.size)
    workload, mesh = request.workload, request.mesh
    torch.set_num_threads(1)
    torch.set_default_dtype(workload.dtype)  # DistDL makes its empty weights of the default type
    partition = MPIPartition(world).create_cartesian_topology_partition([1, 1, *mesh])
    network = replace_layers(make_network(workload), lambda layer: distributed_twin(partition, layer))
    x_BCHW = block_of(make_input(workload), mesh, world.rank, workload.alignment).requires_grad_()
    weights_BCHW = block_of(make_loss_weights(workload), mesh, world.rank, workload.alignment)

    def step() -> torch.Tensor:
        x_BCHW.grad = None
        network.zero_grad()
        y_BCHW = network(x_BCHW)
        loss_of(y_BCHW, weights_BCHW).backward()
        return y_BCHW.detach()

    y_BCHW = step()
    blocks = world.gather((y_BCHW, x_BCHW.grad))
    equal = {}
    if blocks is not None:
        dw = {name: tensor.grad.clone() for name, tensor in network.named_parameters() if tensor.grad is not None}
        y_blocks, dx_blocks = zip(*blocks, strict=True)
        equal = compare(workload, Gradients(assemble(list(y_blocks), mesh), assemble(list(dx_blocks), mesh), dw))
    seconds = median_seconds(step, world.Barrier, request.repeat)
    if world.rank == 0:
        notes = [f"distdl {distdl.__version__}, torch {torch.__version__}"]
        if workload.name == "unet":
            notes += [f"{workload.levels} levels, {workload.base_channels} base channels, {workload.upsampling}"]
        if workload.name == "unet" and workload.upsampling == "transposed":
            notes += ["transposed convolution is torch's, its weights broadcast by DistDL"]
        report("distdl", request, seconds, equal, "; ".join(notes))


if __name__ == "__main__":
    main()
