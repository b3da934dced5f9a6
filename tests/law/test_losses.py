"""The law for every loss: a step's loss and gradients are those of the formula on the whole raster, as torch's autograd
takes them in float64, on any number of ranks, in every halo mode, and with stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional

from tests.comm.in_order import Order, in_order
from tests.law.cases import IGNORED, KEY, Case, as_batch, gradients
from tests.law.test_halo_modes import Setting, difference, steps
from tests.law.test_pipelines import Strip
from tests.law.test_pipelines import alone as alone_in_one_piece
from tests.law.test_pipelines import steps as steps_in_stages
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.geometry.box import Box
from tiledseg.models.dropout import set_dropout_key
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.training.losses.edge_objective import BoundaryTerm, signed_distances
from tiledseg.training.losses.objective import Objective, OverlapTerm, PixelTerm

WEIGHTS = (0.5, 3.0, 1.5, 0.0)
K = len(WEIGHTS)
RADIUS = 5
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of scores (P, K) and classes (P,) of valid pixels


def focal(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    shares_P = scores_PK.softmax(1)[range(len(target_P)), target_P]
    weights_P = torch.tensor(WEIGHTS, dtype=torch.float64)[target_P]
    return (-weights_P * (1 - shares_P) ** 1.5 * shares_P.log()).sum() / weights_P.sum()


def tversky(scores_PK: torch.Tensor, target_P: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    shares_PK, indices, weights = scores_PK.softmax(1), [], []
    for k in range(K):
        right = shares_PK[target_P == k, k].sum()
        wrongly_in, wrongly_out = shares_PK[target_P != k, k].sum(), (1 - shares_PK[target_P == k, k]).sum()
        indices.append(right / (right + alpha * wrongly_in + beta * wrongly_out))
        weights.append(WEIGHTS[k])
    return 1 - sum(w * index for w, index in zip(weights, indices, strict=True)) / sum(weights)


def smoothed(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    weights_K = torch.tensor(WEIGHTS, dtype=torch.float64)
    return functional.cross_entropy(scores_PK, target_P, weights_K, label_smoothing=0.2)


def both(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    return 2 * smoothed(scores_PK, target_P) + 0.5 * tversky(scores_PK, target_P, 0.5, 0.5)


SMOOTHED = PixelTerm(IGNORED, weights=WEIGHTS, smoothing=0.2)
LOSSES: dict[str, tuple[Objective, Formula]] = {
    "smoothed": (Objective((SMOOTHED,)), smoothed),
    "focal": (Objective((PixelTerm(IGNORED, weights=WEIGHTS, gamma=1.5),)), focal),
    "tversky": (
        Objective((OverlapTerm(IGNORED, K, 1.0, 0.2, 0.9, WEIGHTS),)),
        lambda x, y: tversky(x, y, 0.2, 0.9),
    ),
    "both": (Objective((replace(SMOOTHED, factor=2.0), OverlapTerm(IGNORED, K, 0.5, weights=WEIGHTS))), both),
}


@dataclass(frozen=True)
class Near(Case):
    """Labels come with the margin that the boundary loss needs."""

    def dataset(self, grid: tuple[int, int] | None = None, dtype: str = "float64") -> Dataset:
        found = super().dataset(grid, dtype)
        found.margin = RADIUS
        return found


def unet(norm: str) -> UNet:
    return UNet(3, 1, 3, 4, norm=norm, dropout=0.2, bands=2, classes=K)


MODES = {
    "read": Setting(Case(unet("none"), (4, 4)), ParallelConfig()),
    "exchange": Setting(Case(unet("none"), (4, 4)), ParallelConfig(halo="exchange")),
    "layer": Setting(Case(unet("batch"), (4, 4)), ParallelConfig(halo="layer")),
}


@dataclass
class Whole:
    loss: float
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def whole(case: Case, formula: Formula) -> Whole:
    """By torch alone, on the undivided raster."""
    network = case.network().train()
    set_dropout_key(network, KEY)
    sample = case.dataset((1, 1)).load(0, 0)
    rows, cols = sample.tile.core_in_output.slices
    scores_PK = network(as_batch(sample.x_CHW))[0, :, rows, cols].permute(1, 2, 0).reshape(-1, K)
    target_P = torch.from_numpy(sample.y_HW).long().reshape(-1)
    loss = formula(scores_PK[target_P != IGNORED], target_P[target_P != IGNORED])
    loss.backward()
    return Whole(loss.item(), gradients(network), network.state_dict())


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mode", "name"),
    [*(("read", name) for name in LOSSES), ("exchange", "both"), ("layer", "both"), ("layer", "focal")],
)
def test_a_step_is_that_of_the_formula_on_the_whole_raster(mode: str, name: str, meshes: dict[str, Mesh]) -> None:
    """Running statistics move once, however often the step goes forward."""
    torch.set_num_threads(1)
    mesh, own, (objective, formula) = meshes["gloo"], MODES[mode], LOSSES[name]
    expected = whole(own.case, formula)
    with in_order(mesh, Order.QUEUE) if mode == "layer" and mesh.size > 1 else nullcontext(mesh) as used:
        found = steps(own, own.plan(mesh.size), used, 1, 0.0, objective)
    assert found.losses == pytest.approx([expected.loss], rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["read", "layer"])
def test_boundaries_are_those_of_the_whole_raster(mode: str, meshes: dict[str, Mesh]) -> None:
    """Distances over tiles and ranks, beside a loss with weights: `signed_distances` is held to scipy elsewhere."""
    torch.set_num_threads(1)
    mesh, setting = meshes["gloo"], MODES[mode]
    own = replace(setting, case=Near(setting.case.unet, setting.case.grid))
    objective = Objective((PixelTerm(IGNORED, weights=WEIGHTS), BoundaryTerm(IGNORED, 0.3, RADIUS)))
    y_HW = own.case.dataset((1, 1)).load(0, 0).labels(Box.of_shape(own.case.raster), RADIUS)
    phi_KHW = signed_distances(torch.from_numpy(y_HW)[None], K, RADIUS, IGNORED)[0]
    phi_PK = phi_KHW.permute(1, 2, 0).reshape(-1, K)

    def formula(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
        known_P = torch.from_numpy(y_HW[RADIUS:-RADIUS, RADIUS:-RADIUS].reshape(-1) != IGNORED)
        entropy = functional.cross_entropy(scores_PK, target_P, torch.tensor(WEIGHTS, dtype=torch.float64))
        return entropy + 0.3 * (scores_PK.softmax(1) * phi_PK[known_P]).sum(1).mean()

    expected = whole(own.case, formula)
    found = steps(own, own.plan(mesh.size), mesh, 1, 0.0, objective)
    assert found.losses == pytest.approx([expected.loss], rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_stages_go_forward_once_more(schedule: str, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    mesh, (objective, _) = meshes["gloo"], LOSSES["both"]
    case = Strip(unet("none"), (3, 1))
    stages = min(mesh.size, 2)
    losses, own = steps_in_stages(case, ParallelConfig(stages=stages, schedule=schedule), mesh, objective)
    parts = mesh.communicator.gather_objects(own)
    expected_losses, expected = mesh.on_root(lambda: alone_in_one_piece(case, objective))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert difference({name: tensor for part in parts for name, tensor in part.items()}, expected) < 1e-12


def test_a_step_without_a_pixel_that_counts() -> None:
    objective = Objective((PixelTerm(IGNORED, weights=WEIGHTS), OverlapTerm(IGNORED, K, weights=WEIGHTS)))
    scores_BKHW = torch.randn(1, K, 3, 3, dtype=torch.float64)
    for target in (IGNORED, 3):  # the weight of class 3 is 0
        sums = objective.sums((scores_BKHW,), torch.full((1, 3, 3), target, dtype=torch.uint8))
        assert objective.value(sums) is None
