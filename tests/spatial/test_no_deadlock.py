"""No configuration hangs: drawn ones end within a time limit with the undivided result, illegal ones start nothing.

Several images in flight on several replicas, each in an order of its own, before the first backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from tests.geometry.drawn import networks as graphs
from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, Network, image, with_weights
from tests.spatial.together import for_all
from tests.spatial.twins import (
    OpenAxes,
    Result,
    as_graph,
    copied,
    difference,
    loss_weights,
    refusal,
    start,
)
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.network import build_network
from tiledseg.spatial.network import SpatialNetwork

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Flight:
    """Images, each cut in its way, that are forwarded one after the other and then taken back in the order `back`."""

    network: Network
    shapes: tuple[tuple[int, int, int, int], ...]
    cuts: tuple[tuple[Partition, Partition], ...]
    back: tuple[int, ...]
    fusion: int
    settles: bool
    overlap: bool

    def images(self, replica: int) -> list[torch.Tensor]:
        return [image(shape, 10 * replica + number) for number, shape in enumerate(self.shapes)]

    def order(self, replica: int) -> list[int]:
        """Every other replica starts with the last image: what one image's ranks do is no concern of another's."""
        numbers = list(range(len(self.shapes)))
        return numbers[::-1] if replica % 2 else numbers


@st.composite
def flights(draw: st.DrawFn, shape: tuple[int, int]) -> Flight:
    """A network drawn layer by layer; sizes that it takes, or that some rank would have nothing of."""
    sizes = [8, 12, 16, 20]
    network = with_weights(build_network(draw(graphs()), CHANNELS), 1)
    steps = draw(st.integers(1, 3))
    shapes = []
    for _ in range(steps):
        sides = [draw(st.sampled_from([size for size in sizes if size >= ranks])) for ranks in shape]
        shapes.append((draw(st.integers(1, 2)), CHANNELS, *sides))
    cuts = tuple((draw(drawn.cuts(shape[0], s[2])), draw(drawn.cuts(shape[1], s[3]))) for s in shapes)
    back = tuple(draw(st.permutations(range(steps))))
    fusion = draw(st.sampled_from([1, 2, 3, WHOLE]))
    return Flight(network, tuple(shapes), cuts, back, fusion, draw(st.booleans()), draw(st.booleans()))


def undivided(flight: Flight, replica: int) -> list[Result]:
    network = copied(flight.network)
    x_BCHW = [x.requires_grad_() for x in flight.images(replica)]
    y_BCHW: dict[int, torch.Tensor] = {}
    for number in flight.order(replica):
        y_BCHW[number] = network(x_BCHW[number].clone())
    for number in flight.back:
        (y_BCHW[number] * loss_weights(y_BCHW[number].shape)).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    buffers = dict(network.named_buffers())
    return [Result(y_BCHW[i].detach(), x.grad, gradients, buffers) for i, x in enumerate(x_BCHW)]


def divided(
    flight: Flight, cuts: list[tuple[Partition, Partition]], axes: Axes, shapes: list[torch.Size]
) -> list[Result]:
    network = copied(flight.network)
    spatial = SpatialNetwork(as_graph(network), axes, flight.fusion, flight.overlap)
    replica = axes.position.replica
    images = flight.images(replica)
    runs = {number: start(spatial, network, images[number], *cuts[number]) for number in flight.order(replica)}
    for number in flight.back:
        runs[number].backward(shapes[number])
    return [runs[number].finish(x.shape, shapes[number]) for number, x in enumerate(images)]


def check(flight: Flight, opened: OpenAxes, axes: Axes) -> None:
    spatial = SpatialNetwork(as_graph(flight.network), axes, flight.fusion)
    cuts = [spatial.settle(*cut) if flight.settles else cut for cut in flight.cuts]
    refused = [refusal(flight.network, axes, *cut, flight.fusion) for cut in cuts]
    everywhere = opened.mesh.communicator.gather_objects(refused)
    assert all(reasons == refused for reasons in everywhere), everywhere
    if any(refused):
        return
    fault = None
    if axes.position is not None:
        expected = undivided(flight, axes.position.replica)
        found = divided(flight, cuts, axes, [result.y_BCHW.shape for result in expected])
        faults = [difference(*pair, floor=1.0) for pair in zip(found, expected, strict=True)]
        fault = next((f"image {i}: {f}" for i, f in enumerate(faults) if f), None)
    opened.agree(fault)


def test_drawn_configurations_end_with_the_undivided_result(opened: OpenAxes) -> None:
    size = opened.mesh.size
    meshes = [(1, *shape) for shape in opened.shapes()]
    meshes += [(2, 1, size // 2), (2, size // 2, 1)] if size >= 4 else []
    for replicas, rows, cols in meshes:
        axes = opened.of(rows, cols, replicas)
        for_all(opened, flights((rows, cols)), lambda flight, a=axes: check(flight, opened, a), 3)
