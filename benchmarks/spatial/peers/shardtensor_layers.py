r"""PhysicsNeMo's ShardTensor against torch: equality and time, on CPUs over Gloo.

    PYTHONPATH=<physicsnemo> torchrun --nproc-per-node 4 \
        -m benchmarks.spatial.peers.shardtensor_layers --workload conv --mesh 2 2

<physicsnemo> is a checkout of github.com/NVIDIA/physicsnemo; of its dependencies the import needs warp-lang, jaxtyping,
treelib, tqdm, requests, s3fs, GitPython, tensordict, importlib_metadata and nvtx. The network is torch's own: its
layers see ShardTensors, whose handlers exchange halos and reduce the gradients of the weights. PhysicsNeMo registers
its handlers only where CUDA is there; here those for convolution, pooling and upsampling are registered by import.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

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
    Workload,
    assemble,
    block_edges,
    block_of,
    loss_of,
    make_input,
    make_loss_weights,
    make_network,
)
from tiledseg.models.layers.convolution import SteadyConvolution

try:
    import physicsnemo
    from physicsnemo.domain_parallel import ShardTensor
    from physicsnemo.domain_parallel.custom_ops import sum_wrapper  # noqa: F401
    from physicsnemo.domain_parallel.shard_utils import (  # noqa: F401
        conv_patches,
        pooling_patches,
        unpooling_patches,
    )
except ImportError as error:
    not_runnable(error)


def sharding_shapes(
    workload: Workload, mesh: tuple[int, int], rank: int, bands: int
) -> dict[int, tuple[torch.Size, ...]]:
    """For each axis of the mesh, the shapes of the blocks along it through this rank's own: spares a CUDA gather."""
    row, col = divmod(rank, mesh[1])
    heights, widths = (
        [stop - start for start, stop in pairwise(edges)]
        for edges in (block_edges(n, parts, workload.alignment) for n, parts in zip(workload.size, mesh, strict=True))
    )
    return {
        0: tuple(torch.Size((1, bands, height, widths[col])) for height in heights),
        1: tuple(torch.Size((1, bands, heights[row], width)) for width in widths),
    }


def main() -> None:
    if "RANK" not in os.environ:
        not_runnable("torchrun has not started it (RANK is not set)")
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    request = parse_request(__doc__ or "", distributed.get_world_size())
    workload, mesh = request.workload, request.mesh
    torch.set_num_threads(1)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("row", "col"))
    network = replace_layers(make_network(workload), torchs_own)
    x_BCHW = block_of(make_input(workload), mesh, rank, workload.alignment).requires_grad_()
    weights_BCHW = block_of(make_loss_weights(workload), mesh, rank, workload.alignment)
    shapes = sharding_shapes(workload, mesh, rank, x_BCHW.shape[1])

    def step() -> torch.Tensor:
        x_BCHW.grad = None
        network.zero_grad()
        sharded = ShardTensor.from_local(x_BCHW, device_mesh, (Shard(2), Shard(3)), sharding_shapes=shapes)
        y_BCHW = network(sharded).to_local()
        loss_of(y_BCHW, weights_BCHW).backward()
        return y_BCHW.detach()

    y_BCHW = step()
    blocks = [None] * distributed.get_world_size() if rank == 0 else None
    distributed.gather_object((y_BCHW, x_BCHW.grad), blocks)
    equal = {}
    if blocks is not None:
        dw = {name: tensor.grad.clone() for name, tensor in network.named_parameters() if tensor.grad is not None}
        y_blocks, dx_blocks = zip(*blocks, strict=True)
        equal = compare(workload, Gradients(assemble(list(y_blocks), mesh), assemble(list(dx_blocks), mesh), dw))
    seconds = median_seconds(step, distributed.barrier, request.repeat)
    if rank == 0:
        notes = [f"physicsnemo {physicsnemo.__version__}, torch {torch.__version__}, gloo"]
        if workload.name == "unet":
            notes += [f"{workload.levels} levels, {workload.base_channels} base channels, {workload.upsampling}"]
        report("shardtensor", request, seconds, equal, "; ".join(notes))
    distributed.destroy_process_group()


def torchs_own(layer: nn.Module) -> nn.Module:
    """Activations out of place; convolutions that call what its handlers know."""
    if isinstance(layer, nn.LeakyReLU):
        return nn.LeakyReLU(layer.negative_slope)
    if isinstance(layer, SteadyConvolution):
        plain = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, padding=layer.padding)
        plain.weight, plain.bias = layer.weight, layer.bias
        return plain
    return layer


if __name__ == "__main__":
    main()
