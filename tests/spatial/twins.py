"""A layer or network over the ranks of one image, beside its undivided twin on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.spatial.thread_ranks import on_ranks
from tiledseg.comm.mesh import Axes, Mesh, open_axes, serial_axes
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.sharing.decomposition import MeshShape, Partition
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.spatial.twins import spatial_layer

Network = GraphNetwork | nn.Sequential
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
NAMED_SHAPES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 3), (4, 4)]
FLOOR = 1e-2  # of all gradients together; see difference


@dataclass
class OpenAxes:
    """The axes of each shape over a mesh, opened when they are first asked for. `of` and `agree` are collective."""

    mesh: Mesh
    _opened: dict[MeshShape, Axes] = field(default_factory=dict)

    def of(self, rows: int, cols: int, replicas: int = 1) -> Axes:
        shape = MeshShape(replicas, rows, cols)
        if shape not in self._opened:
            self._opened[shape] = serial_axes() if self.mesh.size == 1 else open_axes(self.mesh, shape)
        return self._opened[shape]

    def shapes(self) -> list[tuple[int, int]]:
        """Rows x cols of the named meshes that use most ranks of the job; jobs of fewer ranks show the others."""
        fitting = [shape for shape in NAMED_SHAPES if shape[0] * shape[1] <= self.mesh.size]
        most = max(rows * cols for rows, cols in fitting)
        return [shape for shape in fitting if shape[0] * shape[1] == most]

    def agree(self, fault: str | None) -> None:
        """Fail on every rank where any has a fault, so that all ranks go on together."""
        faults = self.mesh.communicator.gather_objects(fault)
        assert not any(faults), "; ".join(f"rank {rank}: {f}" for rank, f in enumerate(faults) if f is not None)

    def close(self) -> None:
        for axes in self._opened.values():
            axes.close()


@dataclass(frozen=True)
class Result:
    """What one pass gave: y, dx and the gradients and buffers by name. Of the whole image."""

    y_BCHW: torch.Tensor
    dx_BCHW: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def copied(network: Network) -> Network:
    """A copy to compute with. Its instance norms are handed contiguous gradients.

    torch 2.13 on the CPU takes a channels-last one for contiguous where the batch is 1, and gives a wrong dx. (In this
    project's U-Nets an activation follows, whose gradient is contiguous.)
    """
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, nn.InstanceNorm2d):
            module.register_forward_hook(_hand_over_contiguous)
    return network


def _hand_over_contiguous(module: nn.Module, args: object, y_BCHW: torch.Tensor) -> None:
    if y_BCHW.requires_grad:
        y_BCHW.register_hook(torch.Tensor.contiguous)


def as_graph(network: Network) -> GraphNetwork:
    """The network as a graph, which shares the modules of a sequence and the names of their weights."""
    if isinstance(network, GraphNetwork):
        return network
    modules = dict(network.named_children())
    layers = [(name, spatial_layer(name, module)) for name, module in modules.items()]
    nodes = tuple(
        Node(name, layer.rows, cols=None if layer.rows == layer.cols else layer.cols) for name, layer in layers
    )
    return GraphNetwork(Graph(nodes), 1, list(modules.values()), network)


def undivided(network: Network, x_BCHW: torch.Tensor) -> Result:
    """One pass of a copy of the network over the whole image; the loss is a weighted sum of y."""
    network = copied(network)
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = network(x_BCHW.clone())  # the first layer may work in place
    (y_BCHW * loss_weights(y_BCHW.shape).to(y_BCHW)).sum().backward()
    assert x_BCHW.grad is not None
    return Result(y_BCHW.detach(), x_BCHW.grad, _gradients(network), dict(network.named_buffers()))


@dataclass
class Pass:
    """One pass under way on one rank: forward has run. `finish` is collective over the ranks of the image."""

    network: Network
    axes: Axes
    part_BCHW: torch.Tensor
    y_BCHW: torch.Tensor
    own: Box
    given: Box

    def backward(self, shape: torch.Size) -> None:
        """The backward pass; `shape` is that of the whole output."""
        weights_BCHW = loss_weights(shape)[(slice(None), slice(None), *self.given.slices)]
        (self.y_BCHW * weights_BCHW.to(self.y_BCHW)).sum().backward()

    def finish(self, x_shape: torch.Size, y_shape: torch.Size) -> Result:
        """The whole from the blocks, which must cover it once: they are added up."""
        whole_BCHW, dx_BCHW = (torch.zeros(s, dtype=self.y_BCHW.dtype) for s in (y_shape, x_shape))
        whole_BCHW[(slice(None), slice(None), *self.given.slices)] = self.y_BCHW.detach()
        assert self.part_BCHW.grad is not None
        dx_BCHW[(slice(None), slice(None), *self.own.slices)] = self.part_BCHW.grad
        gradients = _gradients(self.network)
        for tensor in (whole_BCHW, dx_BCHW, *gradients.values()):
            self.axes.image.all_reduce_sum(tensor).wait()
        return Result(whole_BCHW, dx_BCHW, gradients, dict(self.network.named_buffers()))


def forward(
    network: Network,
    x_BCHW: torch.Tensor,
    axes: Axes,
    rows: Partition,
    cols: Partition,
    fusion: int = 1,
    overlap: bool = False,
) -> Pass:
    """The forward pass of a copy of the network by the ranks of `axes`."""
    network = copied(network)
    return start(SpatialNetwork(as_graph(network), axes, fusion, overlap), network, x_BCHW, rows, cols)


def start(spatial: SpatialNetwork, network: Network, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> Pass:
    """The forward pass of `spatial`, which computes `network`, for this rank's block of x."""
    axes = spatial.axes
    assert axes.position is not None
    own = Box(rows.blocks[axes.position.row], cols.blocks[axes.position.col])
    part_BCHW = x_BCHW[(slice(None), slice(None), *own.slices)].clone().requires_grad_()
    y_BCHW = spatial(part_BCHW.clone(), rows, cols)
    return Pass(network, axes, part_BCHW, y_BCHW, own, spatial.output(rows, cols))


def refusal(network: Network, axes: Axes, rows: Partition, cols: Partition, fusion: int = 1) -> str | None:
    """Why this rank refuses an input so cut; None where it would compute it. Asserts that it sends nothing first."""
    spatial = SpatialNetwork(as_graph(network), axes, fusion)
    traffic = axes.point_to_point
    before = traffic.messages, traffic.bytes
    first = _refused(lambda: spatial.output(rows, cols))
    if first is not None and axes.position is not None:
        part_BCHW = torch.zeros(1, 1, rows.blocks[axes.position.row].size, cols.blocks[axes.position.col].size)
        again = _refused(lambda: spatial(part_BCHW, rows, cols))
        assert again == first, f"the check says '{first}', the pass '{again}'"
    assert (traffic.messages, traffic.bytes) == before
    return first


def _refused(call: Callable[[], object]) -> str | None:
    try:
        call()
    except GeometryError as error:
        return str(error)
    return None


def check_on_ranks(
    network: Network,
    x_BCHW: torch.Tensor,
    rows: Partition,
    cols: Partition,
    fusion: int = 1,
    overlap: bool = False,
) -> bool:
    """The law for one pass by ranks that are threads: their result is the undivided one (of one rank: its bits), or all
    of them refuse alike.

    False where they refused. What torch refuses on the whole image must be refused.
    """
    expected, reason, exact = None, "", rows.parts == cols.parts == 1
    try:
        expected = undivided(network, x_BCHW)
    except (RuntimeError, ValueError) as error:  # an output of no size; a norm over a single value
        reason = str(error)
    refused = set(on_ranks(rows.parts, cols.parts, lambda axes: refusal(network, axes, rows, cols, fusion)))
    assert len(refused) == 1, refused
    if refused != {None}:
        return False
    assert expected is not None, f"torch refuses this, the ranks do not: {reason}"

    def work(axes: Axes) -> str | None:
        torch.set_num_threads(1)
        run = forward(network, x_BCHW, axes, rows, cols, fusion, overlap)
        run.backward(expected.y_BCHW.shape)
        return difference(run.finish(x_BCHW.shape, expected.y_BCHW.shape), expected, exact=exact)

    faults = on_ranks(rows.parts, cols.parts, work)
    assert not any(faults), faults
    return True


def loss_weights(shape: Sequence[int]) -> torch.Tensor:
    """The same numbers for every pixel whoever asks."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def difference(found: Result, expected: Result, floor: float = FLOOR, exact: bool = False) -> str | None:
    """Where the results differ by more than rounding (or `exact`: at all): y, dx, a gradient or a buffer, and by how
    much. None: nowhere.

    `floor`: a gradient or a buffer smaller than this part of all together is judged as if it were as large. Give 1
    where norms follow one another, or see next to no variance: what cancels there leaves the rounding of all the rest.
    """
    bound = 0.0 if exact else TOLERANCE[expected.y_BCHW.dtype]
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.buffers.keys() == expected.buffers.keys()
    faults = _far({"y": found.y_BCHW}, {"y": expected.y_BCHW}, bound, floor)
    faults += _far(found.buffers, expected.buffers, bound, floor)
    gradients = {"dx": expected.dx_BCHW, **expected.gradients}
    faults += _far({"dx": found.dx_BCHW, **found.gradients}, gradients, bound, floor)
    return "; ".join(faults) or None


def _far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float, floor: float) -> list[str]:
    """Each tensor against its own norm, but no less than a part of their common one."""
    total = sum(t.double().square().sum().item() for t in expected.values()) ** 0.5
    faults = []
    for name, right in expected.items():
        assert found[name].shape == right.shape, (name, found[name].shape, right.shape)
        distance, length = (found[name] - right).double().norm().item(), right.double().norm().item()
        scale = max(length, floor * total)
        if not distance <= bound * scale:  # also NaN
            faults.append(f"{name} is off by {distance:.3g} of {scale:.3g}")
    return faults


def _gradients(network: Network) -> dict[str, torch.Tensor]:
    """Copies, by name; zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in network.named_parameters()}
