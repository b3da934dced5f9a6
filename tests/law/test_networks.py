"""The law for the networks of the sources, small: each halo mode, stages, ranks 1 to 4, and runs of the commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.law.cases import IGNORED, Case
from tests.law.test_halo_modes import Setting, alone, difference, steps
from tests.law.test_pipelines import alone as alone_in_one_piece
from tests.law.test_pipelines import steps as steps_in_stages
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.training.losses.edge_objective import BoundaryTerm, EdgesTerm
from tiledseg.training.losses.objective import Objective, OverlapTerm, PixelTerm

EDGES = Objective((PixelTerm(IGNORED, attention=1.0), EdgesTerm(IGNORED, radius=4)))
WEIGHTS = (0.5, 3.0, 1.5)
WEIGHTED = Objective(
    (
        PixelTerm(IGNORED, weights=WEIGHTS, attention=2.0),
        OverlapTerm(IGNORED, 3, 0.5, weights=WEIGHTS),
        BoundaryTerm(IGNORED, 0.2, 3),
        EdgesTerm(IGNORED, radius=4),
    )
)


@dataclass(frozen=True)
class Short(Case):
    """Few pixels: as many rows of tiles as four ranks share, each larger than what the deepest layers need. Labels come
    with the margin that the loss of edges needs."""

    rows: int = 9

    @property
    def raster(self) -> tuple[int, int]:
        unit = self.footprint.alignment
        return self.rows * unit + 1, 2 * unit + 3

    def dataset(self, grid: tuple[int, int] | None = None, dtype: str = "float64") -> Dataset:
        found = super().dataset(grid, dtype)
        found.margin = EDGES.margin
        return found


def segnet(norm: str, levels: int = 3) -> SegNet:
    return SegNet(levels, 4, norm, bands=2, classes=3)


def residual(norm: str, encoder: str = "resnet18", upsampling: str = "nearest") -> ResidualUNet:
    return ResidualUNet(encoder, 4, norm, upsampling, bands=2, classes=3)


def gated(norm: str, image_mean: bool) -> GatedSCNN:
    return GatedSCNN("resnet18", 8, norm, image_mean, bands=2, classes=3)


def setting(network: Any, **parallel: Any) -> Setting:
    return Setting(Short(network, (8, 2)), ParallelConfig(**parallel))


SETTINGS = {
    "segnet-exchange": setting(segnet("none", 2), halo="exchange"),
    "segnet-batch": setting(segnet("batch"), halo="layer"),
    "residual-exchange": setting(residual("pixel"), halo="exchange"),
    "residual-batch": setting(residual("batch"), halo="layer"),
    "residual50-group": setting(residual("group", "resnet50", "bilinear"), halo="layer", fusion=2, overlap=True),
    "gated-exchange": setting(gated("pixel", False), halo="exchange"),
    "gated-batch": setting(gated("batch", True), halo="layer"),
    "gated-pixel": setting(gated("pixel", True), halo="layer", fusion=2),
    "weighted-read": setting(gated("pixel", False)),
    "weighted-batch": setting(gated("batch", True), halo="layer"),
}
# The batch norms, over the ranks of an image, on every number of them.
RANKS = {
    "segnet-exchange": (3,),
    "residual-exchange": (2,),
    "residual50-group": (2,),
    "gated-exchange": (4,),
    "gated-pixel": (3,),
    "weighted-read": (2,),
    "weighted-batch": (4,),
}
OBJECTIVES = {"gated": EDGES, "weighted": WEIGHTED}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ranks(*RANKS.get(name, (2, 3, 4)))) for name in SETTINGS]
)
def test_a_step_in_each_mode(name: str, meshes: dict[str, Mesh]) -> None:
    """One step at rate 0. More would compare rounding: the gradient of a bias before a norm is 0 but for rounding, of
    either sign, and AdamW divides it by its own size."""
    torch.set_num_threads(1)
    mesh, own, objective = meshes["mpi"], SETTINGS[name], OBJECTIVES.get(name.split("-")[0])
    spread = own.plan(mesh.size)
    found = steps(own, spread, mesh, 1, 0.0, objective)
    expected = mesh.on_root(lambda: alone(own, 1, 0.0, objective))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("network", "objective"),
    [(segnet("none"), None), (residual("none"), None), (gated("none", False), EDGES), (gated("none", False), WEIGHTED)],
    ids=["segnet", "residual_unet", "gated_scnn", "weighted"],
)
def test_stages(network: Any, objective: Objective | None, meshes: dict[str, Mesh]) -> None:
    """Cut by multiply-adds, so indices and shortcuts cross the cuts."""
    torch.set_num_threads(1)
    mesh, case = meshes["gloo"], Short(network, (3, 1), 3)
    if mesh.size > 3:
        pytest.skip("three stages at most")
    parallel = ParallelConfig(stages=mesh.size, schedule="1f1b", balance="modelled", recompute="except_last")
    losses, own = steps_in_stages(case, parallel, mesh, objective)
    parts = mesh.communicator.gather_objects(own)
    expected_losses, expected = mesh.on_root(lambda: alone_in_one_piece(case, objective))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert difference({name: tensor for part in parts for name, tensor in part.items()}, expected) < 1e-12
