"""The workload on our spatial layers: gradients held against torch's on the whole image, and the time of a step."""

from __future__ import annotations

import torch

from benchmarks.spatial.request import compare, median_seconds, parse_request, report
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
from tiledseg.comm.axes import open_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.gradients import GradientReducer
from tiledseg.spatial.network import SpatialNetwork


def measure(mesh: Mesh, layout: str, description: str) -> None:
    """Parses the command line and prints the line on rank 0. Collective."""
    request = parse_request(description, mesh.size)
    workload, shape = request.workload, request.mesh
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    axes = open_axes(mesh, MeshShape(1, *shape))
    network = make_network(workload).to(memory_format=memory_format)  # type: ignore[call-overload]
    spatial = SpatialNetwork(network, axes)
    rows, cols = (_partition(workload, dim, shape[dim]) for dim in (0, 1))
    x_BCHW = block_of(make_input(workload), shape, mesh.rank, workload.alignment)
    x_BCHW = x_BCHW.contiguous(memory_format=memory_format).requires_grad_()
    weights_BCHW = block_of(make_loss_weights(workload), shape, mesh.rank, workload.alignment)
    weights_BCHW = weights_BCHW.contiguous(memory_format=memory_format)
    reducer = GradientReducer(network.parameters(), mesh.communicator)

    def step() -> torch.Tensor:
        x_BCHW.grad = None
        reducer.zero()
        y_BCHW = spatial(x_BCHW, rows, cols)
        reducer.overlap()
        loss_of(y_BCHW, weights_BCHW).backward()
        reducer.finish()
        reducer.deliver()
        return y_BCHW.detach()

    y_BCHW = step()
    blocks = mesh.communicator.gather_objects((y_BCHW.contiguous(), x_BCHW.grad))
    equal: dict[str, float] = {}
    if mesh.is_root:
        dw = {name: tensor.grad.clone() for name, tensor in network.named_parameters() if tensor.grad is not None}
        y_blocks, dx_blocks = zip(*blocks, strict=True)
        equal = compare(workload, Gradients(assemble(list(y_blocks), shape), assemble(list(dx_blocks), shape), dw))
    mesh.communicator.barrier()  # rank 0 has computed the whole image meanwhile
    seconds = median_seconds(step, mesh.communicator.barrier, request.repeat)
    if mesh.is_root:
        notes = [f"torch {torch.__version__}, {mesh.transport}, {layout}, gradients summed in float64"]
        if workload.name == "unet":
            notes += [f"{workload.levels} levels, {workload.base_channels} base channels, {workload.upsampling}"]
        report("tiledseg", request, seconds, equal, "; ".join(notes))
    reducer.close()
    axes.close()


def _partition(workload: Workload, dim: int, parts: int) -> Partition:
    return Partition(tuple(block_edges(workload.size[dim], parts, workload.alignment)))
