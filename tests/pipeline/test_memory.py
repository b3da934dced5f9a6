"""What a stage really keeps: tensors that autograd has saved, counted while the pipeline runs."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.pipeline.undivided import Drawn, network_of
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh, open_axes
from tiledseg.config.words import SCHEDULES
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.pipeline.balance import BalancePrices, choose_balances, choose_folded_balances
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.pipeline.schedule import Route, Settings

COUNT = 8
PLAIN = UNet(3, 2, 3, 3, "same", "none", "transposed", 0.2, bands=2, classes=3)


class Saved:
    """A tensor that autograd has saved. `alive`: how many there are, and were at most."""

    alive = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Saved.alive += 1
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= 1


def run(schedule: str, recompute: str, count: int, mesh: Mesh, balance: tuple[int, ...] = ()) -> None:
    """A step of micro-batches of 16 x 16 pixels, a stage on each rank. Collective."""
    axes, graph, network = open_axes(mesh, MeshShape(1, 1, 1, mesh.size)), PLAIN.graph(), network_of(PLAIN)
    prices, skips = BalancePrices([1] * len(graph)), [(tensor - 1, reader) for tensor, reader in graph.skips]
    folds = schedule == "folded"
    balances = choose_folded_balances(prices, skips, mesh.size) if folds else choose_balances(prices, mesh.size)
    settings = Settings(schedule, balance or balances[0], (recompute,) * mesh.size)
    executor = PipelineExecutor(split_network(network, settings, mesh.rank, torch.device("cpu"), torch.float64), axes)
    executor.train([Drawn(network, number, (16, 16)) for number in range(count)], lambda chunk: None)
    axes.close()


def most_alive(schedule: str, recompute: str, count: int, mesh: Mesh) -> tuple[int, int]:
    """Saved tensors alive at most on this rank, and at the end; 0 where it is outside the mesh. Collective."""
    Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        run(schedule, recompute, count, mesh)
    return Saved.most, Saved.alive


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "never"), ("gpipe", "never"), ("gpipe", "except_last"), *((each, "always") for each in SCHEDULES)],
)
def test_activations_in_flight_are_those_of_the_formula(schedule: str, recompute: str, meshes: dict[str, Mesh]) -> None:
    """As many times the tensors of one micro-batch as the schedule says: stages - i for 1f1b, all for gpipe; with
    recomputation once. `except_last` keeps the last of gpipe, whose backward pass comes first."""
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    one, left = most_alive(schedule, "never" if recompute == "except_last" else recompute, 1, mesh)
    most, left_of_all = most_alive(schedule, recompute, COUNT, mesh)
    in_flight = {"gpipe": COUNT, "1f1b": min(mesh.size - mesh.rank, COUNT)}[schedule] if recompute == "never" else 1
    assert (most, left, left_of_all) == (in_flight * one, 0, 0)
    assert one > 0


@pytest.mark.mpi(min_size=2)
def test_a_received_skip_goes_with_its_concatenation(meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """In gpipe, when the last micro-batch has gone forward, the skips of the ones before it are no longer there."""
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    received: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    alive: list[int] = []
    make, loss = PipelineExecutor.buffer, Drawn.loss

    def noted(executor: PipelineExecutor, route: Route, micro_batch: Drawn) -> torch.Tensor:
        tensor = make(executor, route, micro_batch)
        if executor._split.cut.is_skip(route) and route.target in executor.chunks:
            received.append((micro_batch.number, weakref.ref(tensor)))
        return tensor

    def counted(micro_batch: Drawn, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        if micro_batch.number == COUNT - 1:
            alive.append(sum(number < COUNT - 1 and ref() is not None for number, ref in received))
        return loss(micro_batch, *outputs_BKHW)

    monkeypatch.setattr(PipelineExecutor, "buffer", noted)
    monkeypatch.setattr(Drawn, "loss", counted)
    # All marks on the first stage, the pooling after the last of them too; all that take them on the last.
    layers = PLAIN.graph()
    encoder = max(index for index, node in enumerate(layers.nodes) if node.name.endswith("stash")) + 2
    between = mesh.size - 2
    stages = (encoder, *(1,) * between, len(layers) - encoder - between)
    run("gpipe", "never", COUNT, mesh, stages)
    if mesh.rank == mesh.size - 1:
        assert len(received) == 2 * COUNT, "both skips have come each time"
        assert alive == [0]
