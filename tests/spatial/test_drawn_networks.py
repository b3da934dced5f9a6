"""Drawn networks over ranks that are threads: several images in flight, taken back in another order, end with the
undivided result. A cut that does not fit is refused alike on all ranks, before any message."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tests.geometry.drawn import networks as graphs
from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, image, with_weights
from tests.spatial.test_block_network import in_blocks
from tests.spatial.thread_ranks import on_ranks
from tests.spatial.twins import Result, as_graph, copied, difference, loss_weights, refusal, start
from tiledseg.comm.mesh import Axes
from tiledseg.errors import GeometryError
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.network import GraphNetwork, build_network
from tiledseg.spatial.network import SpatialNetwork


@dataclass(frozen=True)
class Flight:
    """Images, each cut in its way by `ranks`, that are forwarded one after the other and taken back in order `back`."""

    ranks: tuple[int, int]
    network: GraphNetwork
    images: tuple[torch.Tensor, ...]
    cuts: tuple[tuple[Partition, Partition], ...]
    back: tuple[int, ...]
    fusion: int
    overlap: bool


@st.composite
def flights(draw: st.DrawFn) -> Flight:
    """A network drawn layer by layer; sizes that it takes, or that some rank would have nothing of."""
    ranks = draw(st.sampled_from([(1, 2), (2, 1), (1, 3), (2, 2)]))
    network = with_weights(build_network(draw(graphs()), CHANNELS), 1)
    images, cuts = [], []
    for number in range(draw(st.integers(1, 3))):
        sides = [draw(st.sampled_from([8, 12, 16, 20])) for _ in ranks]
        images.append(image((draw(st.integers(1, 2)), CHANNELS, *sides), number))
        cuts.append(tuple(draw(drawn.cuts(parts, side)) for parts, side in zip(ranks, sides, strict=True)))
    if draw(st.booleans()):
        spatial = on_ranks(1, 1, lambda axes: SpatialNetwork(network, axes))[0]
        cuts = [spatial.settle(*cut) for cut in cuts]
    back = tuple(draw(st.permutations(range(len(images)))))
    how = draw(st.sampled_from([1, 2, 3, WHOLE])), draw(st.booleans())
    return Flight(ranks, network, tuple(images), tuple(cuts), back, *how)


def undivided(flight: Flight) -> list[Result]:
    network = copied(flight.network)
    x_BCHW = [x.clone().requires_grad_() for x in flight.images]
    y_BCHW = [network(x.clone()) for x in x_BCHW]
    for number in flight.back:
        (y_BCHW[number] * loss_weights(y_BCHW[number].shape)).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    buffers = dict(network.named_buffers())
    return [Result(y.detach(), x.grad, gradients, buffers) for x, y in zip(x_BCHW, y_BCHW, strict=True)]


def divided(flight: Flight, axes: Axes, shapes: list[torch.Size]) -> list[Result]:
    torch.set_num_threads(1)
    network = copied(flight.network)
    spatial = SpatialNetwork(as_graph(network), axes, flight.fusion, flight.overlap)
    runs = [start(spatial, network, x, *cut) for x, cut in zip(flight.images, flight.cuts, strict=True)]
    for number in flight.back:
        runs[number].backward(shapes[number])
    return [run.finish(x.shape, shape) for run, x, shape in zip(runs, flight.images, shapes, strict=True)]


def test_drawn_networks_end_with_the_undivided_result() -> None:
    """And so does a single image in such blocks on one rank."""
    blocks = []

    @settings(law, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(flights())
    def ends(flight: Flight) -> None:
        def reasons(axes: Axes) -> list[str | None]:
            return [refusal(flight.network, axes, *cut, flight.fusion) for cut in flight.cuts]

        first, *others = on_ranks(*flight.ranks, reasons)
        assert all(other == first for other in others)
        if any(first):
            return
        expected = undivided(flight)
        shapes = [result.y_BCHW.shape for result in expected]
        found = on_ranks(*flight.ranks, lambda axes: divided(flight, axes, shapes))
        if len(flight.images) == 1:
            with suppress(GeometryError):  # two tensors of one kept node, cut apart
                found.append([in_blocks(flight.network, flight.images[0], lambda twin: flight.cuts[0])])
                blocks.append(flight)
        for each in found:
            faults = [difference(*pair, floor=1.0) for pair in zip(each, expected, strict=True)]
            assert drawn.may_tie(flight.network) or not any(faults), faults

    ends()
    assert len(blocks) > 8
