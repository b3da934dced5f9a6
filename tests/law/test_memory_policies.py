"""The law of memory policies over ranks: the same steps to the last bit, and not one message more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.law.cases import Case
from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.law.test_halo_modes import Run, Setting, steps, unet
from tests.models.test_rebuild import POLICIES
from tests.pipeline.test_executor import Case as StagedCase
from tests.pipeline.test_executor import balance, sizes
from tests.pipeline.undivided import Drawn, Result, network_of, result_of
from tiledseg.comm.axes import open_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.models.network import GraphNetwork
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.pipeline.schedule import Settings
from tiledseg.spatial.halo_exchange import HaloExchanger

RATE = 0.002
OVER_RANKS = ("compaction", "everything", "drawn1")


@dataclass(frozen=True)
class PolicyCase(Case):
    """A case whose network goes by a memory policy."""

    policy: str | None = None

    def network(self) -> GraphNetwork:
        network = super().network()
        return network.follow(POLICIES[self.policy](network.graph, network.bands)) if self.policy else network


LAYER = [
    (unet("same", "bilinear", "batch"), ParallelConfig(halo="layer")),
    (unet("same", "transposed", "instance"), ParallelConfig(halo="layer", fusion=3)),
    (unet("valid", "nearest"), ParallelConfig(halo="layer", overlap=True)),
    (EveryLayer(whole=True), ParallelConfig(halo="layer")),
    (ForeignLayers(), ParallelConfig(halo="layer", fusion=2)),
    (unet("same", "transposed", "pixel"), ParallelConfig(halo="exchange")),
]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that this rank starts."""
    started: list[str] = []
    post = HaloExchanger._post

    def counted(self, way, x_BCHW, made_BCHW, *others, **more):  # type: ignore[no-untyped-def]
        started.append(f"{tuple(made_BCHW.shape)} from {tuple(x_BCHW.shape)}")
        return post(self, way, x_BCHW, made_BCHW, *others, **more)

    monkeypatch.setattr(HaloExchanger, "_post", counted)
    return started


RANKS = ((2, 3, 4), (2,), (3,), (2, 4), (3,), (2, 4))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("network", "parallel"),
    [pytest.param(*each, marks=pytest.mark.ranks(*ranks)) for each, ranks in zip(LAYER, RANKS, strict=True)],
    ids=lambda value: getattr(value, "halo", type(value).__name__),
)
def test_the_same_steps_in_every_halo_mode(
    network: EveryLayer, parallel: ParallelConfig, meshes: dict[str, Mesh], exchanges: list[str]
) -> None:
    torch.set_num_threads(1)
    mesh = meshes["mpi"]

    def run(policy: str | None) -> tuple[Run, list[str]]:
        exchanges.clear()
        setting = Setting(PolicyCase(network, (8, 4) if parallel.halo == "layer" else (4, 4), policy=policy), parallel)
        return steps(setting, setting.plan(mesh.size), mesh, 1, RATE), list(exchanges)

    expected, sent = run(None)
    for policy in OVER_RANKS:
        found, sent_by_policy = run(policy)
        assert sent_by_policy == sent, "the same messages in the same order"
        assert found.losses == expected.losses
        for one, other in ((found.gradients, expected.gradients), (found.state, expected.state)):
            assert [name for name in other if not torch.equal(one[name], other[name])] == []


def staged(case: StagedCase, policy: str | None, mesh: Mesh) -> Result | None:
    axes = open_axes(mesh, MeshShape(1, 1, 1, mesh.size))
    assert axes.position is not None
    network = network_of(case.unet)
    if policy:
        network.follow(POLICIES[policy](network.graph, network.bands))
    settings = Settings(case.schedule, balance(case, mesh.size), (case.recompute,) * mesh.size)
    split = split_network(network, settings, axes.position.stage, torch.device("cpu"), torch.float64)
    drawn = [Drawn(network, number, size) for number, size in enumerate(case.sizes)]
    PipelineExecutor(split, axes).train(drawn, lambda chunk: None)
    axes.close()
    return result_of(network, sum(loss for one in drawn for loss in one.losses))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("recompute", ["never", "except_last"])
@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_the_same_gradients_in_stages(schedule: str, recompute: str, meshes: dict[str, Mesh]) -> None:
    """Other micro-batches go forward before one goes backward: their draws are others."""
    torch.set_num_threads(1)
    network = unet("same", "transposed", "batch")
    case = StagedCase(network, schedule, recompute, sizes(network, 3))
    expected = staged(case, None, meshes["gloo"])
    assert expected is not None
    for policy in OVER_RANKS:
        found = staged(case, policy, meshes["gloo"])
        assert found is not None
        assert found.loss == expected.loss
        for one, other in ((found.gradients, expected.gradients), (found.buffers, expected.buffers)):
            assert [name for name in other if not torch.equal(one[name], other[name])] == []
