"""A layer or network over the ranks of one image, beside its undivided twin on each rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.comm.axes import Axes, open_axes, serial_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.mesh_shape import MeshShape
from tiledseg.models.unet import FlatNetwork
from tiledseg.spatial.network import SpatialNetwork

Network = FlatNetwork | nn.Sequential


@dataclass(frozen=True)
class Result:
    """What one pass gave: y, dx and the gradients and buffers by name. Of the whole image."""

    y_BCHW: torch.Tensor
    dx_BCHW: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def axes_of(mesh: Mesh, rows: int, cols: int) -> Axes | None:
    """The axes of one image over the first rows x cols ranks; None where the job has too few. Collective."""
    if rows * cols > mesh.size:
        return None
    return serial_axes() if mesh.size == 1 else open_axes(mesh, MeshShape(1, rows, cols))


def undivided(network: Network, x_BCHW: torch.Tensor, weights_BCHW: torch.Tensor | None = None) -> Result:
    """One pass of a copy of the network over the whole image; the loss is a weighted sum of y."""
    network = copy.deepcopy(network)
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = network(x_BCHW)
    (y_BCHW * loss_weights(y_BCHW)).sum().backward()
    assert x_BCHW.grad is not None
    return Result(y_BCHW.detach(), x_BCHW.grad, _gradients(network), dict(network.named_buffers()))


def divided(
    network: Network, x_BCHW: torch.Tensor, axes: Axes, rows: Partition, cols: Partition, mesh: Mesh, fusion: int = 1
) -> Result | None:
    """The same by the ranks of `axes`, put together on all of them; None on a rank outside the mesh."""
    network = copy.deepcopy(network)
    total = [torch.zeros(0)] * 2
    if axes.position is None:
        spatial = None
    else:
        spatial = SpatialNetwork(network, axes, fusion)
        own = Box(rows.owned(axes.position.row), cols.owned(axes.position.col))
        part_BCHW = x_BCHW[(slice(None), slice(None), *own.slices)].clone().requires_grad_()
        y_BCHW = spatial(part_BCHW, rows, cols)
        out = spatial.output(rows, cols)
        last_rows, last_cols = spatial._windows(rows, cols)
        shape = (*y_BCHW.shape[:2], last_rows[-1].output.size, last_cols[-1].output.size)
        weights_BCHW = loss_weights(torch.empty(shape, dtype=y_BCHW.dtype))[(slice(None), slice(None), *out.slices)]
        (y_BCHW * weights_BCHW).sum().backward()
        assert part_BCHW.grad is not None
        whole_BCHW, dx_BCHW = torch.zeros(shape, dtype=y_BCHW.dtype), torch.zeros_like(x_BCHW)
        whole_BCHW[(slice(None), slice(None), *out.slices)] = y_BCHW.detach()
        dx_BCHW[(slice(None), slice(None), *own.slices)] = part_BCHW.grad
        total = [whole_BCHW, dx_BCHW]
    if spatial is None:
        return None
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in network.named_parameters()}
    for tensor in (*total, *gradients.values()):
        axes.image.all_reduce_sum(tensor).wait()
    return Result(total[0], total[1], gradients, dict(network.named_buffers()))


def loss_weights(like_BCHW: torch.Tensor) -> torch.Tensor:
    """The same numbers for every pixel whoever asks."""
    return torch.randn(like_BCHW.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(like_BCHW)


def worst_difference(found: Result, expected: Result) -> tuple[float, str]:
    """The largest relative difference of y, dx, each gradient and each buffer, and where it is."""
    pairs = {"y": (found.y_BCHW, expected.y_BCHW), "dx": (found.dx_BCHW, expected.dx_BCHW)}
    assert found.gradients.keys() == expected.gradients.keys()
    pairs |= {name: (found.gradients[name], expected.gradients[name]) for name in expected.gradients}
    pairs |= {name: (found.buffers[name], expected.buffers[name]) for name in expected.buffers}
    return max((relative(*pair), name) for name, pair in pairs.items())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; 0 where both are 0. Shapes must agree."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    distance, length = (found - expected).double().norm().item(), expected.double().norm().item()
    return distance / length if length else distance


def _gradients(network: Network) -> dict[str, torch.Tensor]:
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in network.named_parameters()}
