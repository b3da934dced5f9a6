"""Layers are measured as the network runs them, one at a time, and nothing of the network changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.tracing.cases import traced
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import NORMS, UPSAMPLINGS
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.stopwatch import HostClock
from tiledseg.comm.transports.work import Work
from tiledseg.errors import GeometryError
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.pipeline import layer_times
from tiledseg.pipeline.layer_times import (
    LayerTime,
    TensorSpec,
    can_be_measured,
    measure_layer,
    measure_layer_times,
    measure_link,
    slowest_link,
)
from tiledseg.planning.step.cost import layer_costs
from tiledseg.tracing.allocations import AllocationMeter

CPU = torch.device("cpu")
SIZES = {"same": (24, 32), "valid": (44, 52)}
UNETS = [
    *(UNet(3, 1, 3, 4, "same", norm, "transposed", 0.2, bands=3, classes=3) for norm in NORMS),
    *(UNet(3, 2, 3, 4, padding, "none", up, bands=3, classes=3) for padding in SIZES for up in UPSAMPLINGS),
    UNet(1, 1, 3, 4, bands=2),
]


def name(unet: UNet) -> str:
    return f"L{unet.levels}-{unet.padding}-{unet.norm}-{unet.upsampling}"


def network_of(unet: UNet) -> GraphNetwork:
    return build_modules(unet, seed=1).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]


@pytest.mark.parametrize("unet", UNETS, ids=name)
def test_every_layer_has_its_times(unet: UNet) -> None:
    times = measure_layer_times(unet.graph(), unet.bands, SIZES[unet.padding], CPU, torch.float32, repeats=1)
    assert len(times) == len(unet.graph())
    found = dict(zip(unet.graph().names[1:], times, strict=True))
    assert all(t.forward > 0 and t.backward > 0 for n, t in found.items() if "conv" in n or "act" in n or n == "head")
    assert all(t.forward > 0 and t.backward > 0 for n, t in found.items() if "pop" in n or "up" in n)
    assert all(t == LayerTime(0, 0) for n, t in found.items() if "stash" in n)
    if unet.norm == "none":
        assert all(t == LayerTime(0, 0) for n, t in found.items() if "norm" in n)
    if unet.dropout == 0:
        assert all(t == LayerTime(0, 0) for n, t in found.items() if "dropout" in n)


def test_layers_after_an_image_mean_have_their_times() -> None:
    """Its result is one value expanded to all pixels, and so is a gradient that goes through a sum."""
    graph = GatedSCNN("resnet18", 8, bands=3, classes=2).graph()
    times = measure_layer_times(graph, 3, (64, 96), CPU, torch.float32, repeats=1)
    after = [n for n, node in enumerate(graph.nodes) if any("mean" in source for source in node.inputs)]
    assert after
    assert all(times[n].forward > 0 and times[n].backward > 0 for n in after)


def test_no_global_state_of_random_numbers_moves() -> None:
    unet = UNet(3, 1, 3, 4, norm="batch", dropout=0.3, bands=3)
    state = torch.get_rng_state()
    measure_layer_times(unet.graph(), unet.bands, (16, 24), CPU, torch.float64, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("unet", UNETS[:2], ids=name)
def test_layers_get_what_the_network_gives_them(unet: UNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides and dtypes of all inputs, as in the network itself, under autocast; like layers are measured once."""
    network, size, jobs = network_of(unet), SIZES[unet.padding], list[tuple[Any, ...]]()
    monkeypatch.setattr(layer_times, "measure_layer", lambda *job: jobs.append(job) or measure_layer(*job))
    measure_layer_times(network.graph, unet.bands, size, CPU, torch.float32, torch.bfloat16, repeats=1)
    taken: set[tuple[object, ...]] = set()
    for node, module in zip(network.graph.nodes, network.layers.values(), strict=True):

        def before(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], layer: object = node.layer) -> None:
            taken.add((layer, *(TensorSpec.of(x, True)[:3] for x in inputs)))

        module.register_forward_pre_hook(before)
    x_BCHW = torch.randn(1, unet.bands, *size).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        network(x_BCHW)
    assert {(job[0].layer, *(spec[:3] for spec in job[1])) for job in jobs} == taken
    assert len(jobs) < len(network.graph)


def test_at_most_one_layer_is_in_memory() -> None:
    unet = UNet(4, 2, 3, 8, norm="instance", bands=4)
    costs = layer_costs(unet.graph(), unet.bands, (64, 64))
    largest = max(sum(cost.input_bytes) + cost.output_bytes + 4 * cost.parameters for cost in costs)
    with AllocationMeter([]) as meter:
        measure_layer_times(unet.graph(), unet.bands, (64, 64), CPU, torch.float32, repeats=1)
    assert meter.peak <= 3 * largest, "the tensors, their gradients and what the backward pass makes"


def test_an_illegal_size_is_refused() -> None:
    unet = UNet(3, 1, 3, 4)
    with pytest.raises(GeometryError, match="30 is not legal"):
        measure_layer_times(unet.graph(), unet.bands, (32, 30), CPU, torch.float32)


@pytest.mark.parametrize("name", ["Mixed", "Mirrored", "Spacious", "Parsing"])
def test_layers_of_traced_networks_are_measured_or_said_to_be_none(name: str) -> None:
    """Kernels that are no squares, comparisons; means of parts of the image have no module of a description alone."""
    graph = traced(name).graph
    assert can_be_measured(graph) == (name != "Parsing")
    if name != "Parsing":
        times = measure_layer_times(graph, 3, (16, 16), torch.device("cpu"), torch.float32, repeats=1)
        assert len(times) == len(graph)


DELAY = 0.5


class _Slow:
    """Messages whose start takes a while, and longer if they are large, by a clock that knows of nothing else."""

    def __init__(self, inner: PointToPoint, per_byte: float) -> None:
        self._inner, self._per_byte = inner, per_byte
        self.meter = inner.meter
        self.now = 0.0

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        self.now += DELAY + self._per_byte * sum(message.tensor.nbytes for message in sends)
        return self._inner.start(sends, receives)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.mpi
def test_all_ranks_know_the_same_link(mesh: Mesh) -> None:
    """Of each number of stages that the job has ranks for; ranks outside the mesh know it too."""
    for stages in range(2, mesh.size + 1):
        link = slowest_link(mesh.communicator, MeshShape(mesh.size // stages, 1, 1, stages), mesh.device)
        assert all(other == link for other in mesh.communicator.gather_objects(link))
        assert 0 < link.latency < 10
        assert 0 <= link.per_byte < 1e-6, "a megabyte a second, even here"


@pytest.mark.mpi
def test_the_parts_of_a_message_are_told_apart(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay of each message is latency, one that grows with its bytes is not: of both ways one rank sends."""
    if mesh.size < 2:
        pytest.skip("needs 2 ranks")
    messages = _Slow(mesh.communicator.point_to_point(), per_byte=1e-6)
    monkeypatch.setattr(HostClock, "mark", lambda clock: messages.now)
    if mesh.rank < 2:
        link = measure_link(messages, 1 - mesh.rank, mesh.rank == 0, torch.device("cpu"))
        assert link.latency == pytest.approx(DELAY, rel=0.01)
        assert link.per_byte == pytest.approx(0.5e-6)
    messages.close()
