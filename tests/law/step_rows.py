"""Steps of many kinds, with the numbers of ranks that show something of their own; `test_steps.py` runs them. Their
losses: the objective that a run has, and the formula on the whole raster that its mean is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.conftest import NIGHTLY
from tests.law.cases import IGNORED, Case, Strip
from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.law.steps import Formula, Steps
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ParallelConfig
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.network import GraphNetwork
from tiledseg.training.objective import BoundaryTerm, EdgesTerm, Objective, OverlapTerm, PixelTerm

WEIGHTS = (0.5, 3.0, 0.0)
K = len(WEIGHTS)


def focal(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    shares_P = scores_PK.softmax(1)[range(len(target_P)), target_P]
    weights_P = torch.tensor(WEIGHTS, dtype=torch.float64)[target_P]
    return (-weights_P * (1 - shares_P) ** 1.5 * shares_P.log()).sum() / weights_P.sum()


def tversky(scores_PK: torch.Tensor, target_P: torch.Tensor, alpha: float = 0.2, beta: float = 0.9) -> torch.Tensor:
    shares_PK, indices = scores_PK.softmax(1), []
    for k in range(K):
        right = shares_PK[target_P == k, k].sum()
        wrongly_in, wrongly_out = shares_PK[target_P != k, k].sum(), (1 - shares_PK[target_P == k, k]).sum()
        indices.append(right / (right + alpha * wrongly_in + beta * wrongly_out))
    return 1 - sum(w * index for w, index in zip(WEIGHTS, indices, strict=True)) / sum(WEIGHTS)


def smoothed(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    weights_K = torch.tensor(WEIGHTS, dtype=torch.float64)
    return functional.cross_entropy(scores_PK, target_P, weights_K, label_smoothing=0.2)


def both(scores_PK: torch.Tensor, target_P: torch.Tensor) -> torch.Tensor:
    return 2 * smoothed(scores_PK, target_P) + 0.5 * tversky(scores_PK, target_P, 0.5, 0.5)


SMOOTHED = PixelTerm(IGNORED, weights=WEIGHTS, smoothing=0.2)
LOSSES: dict[str, tuple[Objective, Formula | None]] = {
    "smoothed": (Objective((SMOOTHED,)), smoothed),
    "focal": (Objective((PixelTerm(IGNORED, weights=WEIGHTS, gamma=1.5),)), focal),
    "tversky": (Objective((OverlapTerm(IGNORED, 1.0, WEIGHTS, K, 0.2, 0.9),)), tversky),
    "both": (Objective((replace(SMOOTHED, factor=2.0), OverlapTerm(IGNORED, 0.5, WEIGHTS, K))), both),
    "edges": (Objective((PixelTerm(IGNORED, attention=1.0), EdgesTerm(IGNORED, radius=4))), None),
    # Distances are held to scipy's elsewhere.
    "boundary": (Objective((PixelTerm(IGNORED, weights=WEIGHTS), BoundaryTerm(IGNORED, 0.3, radius=5))), None),
    "all": (
        Objective(
            (
                PixelTerm(IGNORED, weights=WEIGHTS, attention=2.0),
                OverlapTerm(IGNORED, 0.5, WEIGHTS, K),
                BoundaryTerm(IGNORED, 0.2, radius=3),
                EdgesTerm(IGNORED, radius=4),
            )
        ),
        None,
    ),
}


THREE = ((0, 1, 2), (0, 1, 2))
ONE_LAST = ((0, 1, 2), (1,))  # the last step of an epoch may have fewer images than ranks
UNITS = ((6, 3), (4, 5), (4, 3), (5, 4), (4, 3))
FIVE = ((0, 1, 2, 3, 4), (1,))
FOUR_BY_DAY = "1f1b always", "1f1b except_last", "gpipe always", "folded never"
ENCODER, PARTS = {"encoder*": 0.0, "bottom*": 0.0}, {"encoder0*": 0.0, "*.bias": 0.0, "decoder*": 0.0}


@dataclass(frozen=True)
class Still(Strip):
    """Batch norms with statistics of other data, which stand still."""

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network, draw = super().network(dtype), torch.Generator().manual_seed(4)
        for module in network.layers.values():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(generator=draw)
                module.running_var.uniform_(0.5, 2.0, generator=draw)
        return network.hold_statistics()


@dataclass(frozen=True)
class MeanOfSteps(Strip):
    """Batch norms that average the statistics of all steps."""

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network = super().network(dtype)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        return network


def unet(norm: str = "none", upsampling: str = "transposed", padding: str = "same", convs: int = 1) -> UNet:
    return UNet(3, convs, 3, 4, padding, norm, upsampling, dropout=0.1, bands=2, classes=K)


def small(norm: str = "none", upsampling: str = "transposed", grid: tuple[int, int] = (6, 3)) -> Strip:
    return Strip(unet(norm, upsampling), grid)


def short(network: Any, grid: tuple[int, int] = (8, 2), rows: int = 9) -> Strip:
    return Strip(network, grid, rows, 2)


def larger(norm: str = "none", upsampling: str = "transposed", padding: str = "same") -> Case:
    """Contexts end inside the raster; a block for each of nine ranks."""
    return Case(unet(norm, upsampling, padding, 2), (8, 4))


def segnet(norm: str) -> SegNet:
    return SegNet(3 if norm == "batch" else 2, 4, norm, bands=2, classes=K)


def residual(norm: str, encoder: str = "resnet18", upsampling: str = "nearest") -> ResidualUNet:
    return ResidualUNet(encoder, 4, norm, upsampling, bands=2, classes=K)


def gated(norm: str, image_mean: bool) -> GatedSCNN:
    return GatedSCNN("resnet18", 8, norm, image_mean, bands=2, classes=K)


def loss(name: str) -> dict[str, Any]:
    objective, formula = LOSSES[name]
    return {"objective": objective, "formula": formula}


def exchange(**more: Any) -> ParallelConfig:
    return ParallelConfig(halo="exchange", **more)


def layer(mesh: list[int] | str = "auto", **more: Any) -> ParallelConfig:
    return ParallelConfig(halo="layer", mesh=mesh, **more)


def staged(stages: int, schedule: str, **more: Any) -> ParallelConfig:
    return ParallelConfig(**{"stages": stages, "schedule": schedule, "balance": "modelled", **more})


class Row(NamedTuple):
    """Steps, the numbers of ranks that show something of their own, and whether communication keeps its order there."""

    steps: Steps
    ranks: tuple[int, ...]
    ordered: bool = False


def preset(name: str, schedule: str, recompute: str | list[str]) -> Row:
    """The paper's network, cut by its balance; without a norm, which tiles would change."""
    network = UNet(PRESETS[name].levels, base_channels=1, dropout=0.1, bands=2, classes=K)
    balance = "modelled" if schedule == "folded" else list(PRESETS[name].balance)
    return Row(
        Steps(
            Strip(network, (4, 1), 3, 1),
            staged(6, schedule, balance=balance, recompute=recompute),
            ((0,),) * 4,
            update="adamw",
        ),
        (6,) if name == "small" or NIGHTLY else (),
    )


ROWS: dict[str, Row] = {
    # Tiles, each with its context.
    "read": Row(Steps(small("pixel", "bilinear"), images=ONE_LAST, batch=2), (3,), True),
    "read, all tiles at once": Row(Steps(small(), images=THREE, batch=100, update="adamw", **loss("focal")), (2,)),
    "read, whole images at once": Row(Steps(small("instance", grid=(1, 1)), images=ONE_LAST, batch=2), (2,)),
    "read, tversky": Row(Steps(small("pixel"), **loss("tversky")), (3,)),
    "read, all losses": Row(Steps(short(gated("pixel", False)), batch=4, **loss("all")), (2,)),
    "exchange": Row(Steps(larger(), exchange(), update="adamw"), (2,)),
    "exchange, valid": Row(Steps(larger("pixel", "bilinear", "valid"), exchange(), batch=3, **loss("both")), (3,)),
    "exchange, replicas": Row(Steps(small(), exchange(mesh=[2, 1]), THREE, factors=ENCODER), (4,), True),
    "exchange, every layer": Row(Steps(Case(EveryLayer(), (8, 4)), exchange()), (2, 9)),
    "exchange, smoothed": Row(Steps(small(), exchange(), factors=PARTS, **loss("smoothed")), (3,)),
    # Halos of layers.
    "layer, batch": Row(Steps(larger("batch", "bilinear"), layer(), **loss("both")), (2, 9)),
    "layer, pixel fused": Row(Steps(larger("pixel", "bilinear"), layer(fusion=4)), (3,)),
    "layer, whole network fused": Row(Steps(larger("none", "nearest", "valid"), layer(fusion=WHOLE)), (4,)),
    "layer, valid batch": Row(Steps(larger("batch", "bilinear", "valid"), layer(overlap=True)), (2, 9)),
    "layer, boundaries": Row(Steps(small("batch"), layer(), **loss("boundary")), (4,)),
    "layer, in order": Row(Steps(small("batch", "bilinear"), layer(), **loss("both")), (3,), True),
    "layer, overlap in order": Row(Steps(small("instance"), layer(overlap=True), ((0, 1),) * 2), (2,), True),
    "layer, fused in order": Row(Steps(small("group", "nearest"), layer(fusion=3)), (4,), True),
    "layer, replicas": Row(Steps(small("instance"), layer([2, 1]), THREE), (4, 6), True),
    "layer, statistics of a step": Row(Steps(small("batch"), layer([1, 1]), ONE_LAST), (2,), True),
    "layer, statistics of shared images": Row(Steps(small("batch"), layer([2, 1], overlap=True), ONE_LAST), (4,)),
    "layer, images at once": Row(Steps(small("batch"), layer([1, 1]), ONE_LAST, batch=3), (2,)),
    "layer, frozen": Row(Steps(small("batch"), layer([2, 1], overlap=True), ONE_LAST, factors=ENCODER), (2,)),
    "layer, still statistics": Row(Steps(Still(unet("batch"), (4, 3)), layer(overlap=True), factors=ENCODER), (3,)),
    "layer, every layer": Row(Steps(Case(EveryLayer(True), (8, 4)), layer(overlap=True)), (2, 9)),
    "layer, foreign layers": Row(Steps(Case(ForeignLayers(True), (8, 4)), layer(fusion=3)), (3, 9)),
    "layer, segnet": Row(Steps(short(segnet("batch")), layer()), (2,)),
    "layer, residual50": Row(
        Steps(short(residual("group", "resnet50", "bilinear")), layer(fusion=2, overlap=True)), (2,)
    ),
    "layer, gated": Row(Steps(short(gated("batch", True)), layer(), **loss("all")), (4,)),
    "layer, gated fused": Row(Steps(short(gated("pixel", True)), layer(fusion=2), **loss("edges")), (2,)),
    # Stages.
    **{
        f"stages, {schedule}": Row(Steps(small(), staged(2, schedule), update="adamw"), ranks, True)
        for schedule, ranks in (("1f1b", (2, 4)), ("gpipe", (2,)), ("folded", (2,)))
    },
    **{
        f"three stages, {schedule}": Row(Steps(small(), staged(3, schedule), ((0, 1),) * 2, **more), ranks, True)
        for schedule, more, ranks in (
            ("1f1b", loss("both"), (3,)),
            ("gpipe", {}, (3,)),
            ("folded", loss("tversky"), (3,)),
        )
    },
    **{
        f"four stages, {schedule}, {recompute}": Row(
            Steps(small("pixel"), staged(4, schedule, recompute=recompute), ((0, 1),) * 2), (4,)
        )
        for schedule in ("1f1b", "gpipe", "folded")
        for recompute in ("never", "always", "except_last")
        if NIGHTLY or f"{schedule} {recompute}" in FOUR_BY_DAY
    },
    "stages, exchange": Row(Steps(small(), staged(2, "1f1b", halo="exchange", mesh=[2, 1]), ((0, 1),) * 2), (4,), True),
    **{
        f"stages, layer {schedule}": Row(
            Steps(small("instance"), staged(2, schedule, halo="layer", mesh=[2, 1]), THREE), (4,), True
        )
        for schedule in ("1f1b", "gpipe", "folded")
    },
    **{
        f"stages of six, layer {schedule}": Row(
            Steps(small("instance"), staged(3, schedule, halo="layer", mesh=[2, 1]), THREE), (6,), True
        )
        for schedule in ("1f1b", "folded")
    },
    "stages of nine": Row(
        Steps(small("instance"), staged(2, "1f1b", halo="layer", mesh=[2, 1], idle_ranks=True), THREE), (9,), True
    ),
    "stages, frozen": Row(
        Steps(small("pixel"), staged(2, "1f1b", recompute="always", balance=[16, 13]), factors=ENCODER), (2,)
    ),
    "stages, still statistics": Row(
        Steps(Still(unet("batch"), (4, 3)), staged(2, "1f1b", recompute="always"), factors={"*.bias": 0.0}), (2,)
    ),
    # Between indices and unpooling, shortcut and sum, before a branch of the input; a mirrored border and what is
    # convolved, and where channels are in other layouts.
    "stages, every layer in four": Row(
        Steps(Case(EveryLayer(), (4, 2)), staged(4, "1f1b", balance=[5, 5, 11, 11], recompute="always")), (4,)
    ),
    "stages, foreign layers in four": Row(
        Steps(Case(ForeignLayers(), (4, 2)), staged(4, "gpipe", balance=[4, 4, 16, 5])), (4,)
    ),
    "stages, gated": Row(
        Steps(short(gated("none", False), (3, 1), 3), staged(2, "1f1b", recompute="except_last"), **loss("all")), (2,)
    ),
    "small preset, folded": preset("small", "folded", "always"),
    "large preset, 1f1b": preset("large", "1f1b", ["always", "never", "except_last", "never", "always", "never"]),
    # Blocks: of tiles, of whole images, and of what ranks share.
    "blocks of tiles": Row(Steps(small("pixel", "bilinear", (2, 2)), blocks=(2, 2), **loss("both")), (2,)),
    "blocks of images": Row(Steps(small("batch", grid=(1, 1)), images=FIVE, units=UNITS, blocks=(2, 3)), (3,)),
    "blocks of two images in order": Row(
        Steps(small("batch", grid=(1, 1)), images=((0, 1), (0, 1)), blocks=(2, 2)), (2,), True
    ),
    "blocks of shared images": Row(
        Steps(small("batch", grid=(2, 1)), layer([2, 1]), FIVE, UNITS, blocks=(1, 3), **loss("both")), (2, 4)
    ),
    "blocks in layer": Row(Steps(small("instance"), layer([2, 1]), THREE, blocks=(2, 2)), (4,), True),
    "blocks in layer, every layer": Row(Steps(Case(EveryLayer(True), (4, 2)), layer(), blocks=(2, 2)), (3,)),
    # torch.compile: traced and differentiated as for a GPU, by torch's own kernels.
    "compiled": Row(Steps(small("pixel", "bilinear", (4, 1)), exchange(), ((0, 1),) * 2, batch=2, compiles=True), (2,)),
}


BLOCKS = {
    "instance": Steps(Strip(unet("instance"), (1, 1)), blocks=(4, 3)),
    "valid-batch": Steps(Case(unet("batch", "transposed", "valid"), (1, 1)), images=ONE_LAST, blocks=(3, 2)),
    "residual50": Steps(short(residual("group", "resnet50", "bilinear"), (1, 1)), blocks=(2, 1)),
    "gated": Steps(short(gated("batch", True), (1, 1)), blocks=(2, 2), **loss("edges")),
    "every-layer": Steps(Case(EveryLayer(True), (1, 1)), blocks=(3, 2)),
    "foreign-layers": Steps(Case(ForeignLayers(True, products=False), (1, 1)), blocks=(2, 3)),
    "ratios": Steps(small("batch", grid=(1, 1)), images=FIVE, units=UNITS, blocks=(1, 2), **loss("both")),
    "one-block": Steps(small("batch", "bilinear", (1, 1)), images=FIVE, units=UNITS, blocks=(1, 1)),
    "mean-of-all-steps": Steps(MeanOfSteps(unet("batch"), (1, 1)), images=ONE_LAST, blocks=(2, 2)),
    "frozen": Steps(small("batch", grid=(1, 1)), images=THREE, blocks=(2, 1), factors=ENCODER),
}


POLICIES = {
    "exchange": (Steps(small("pixel"), exchange()), (2,)),
    "layer": (Steps(small("batch", "bilinear"), layer()), (2,)),
    "every layer": (Steps(Case(EveryLayer(True), (8, 4)), layer()), (4,)),
    "foreign layers": (Steps(Case(ForeignLayers(), (8, 4)), layer(fusion=2)), (2,)),
    "valid overlap": (Steps(larger("none", "nearest", "valid"), layer(overlap=True)), (3,)),
    "1f1b": (Steps(small(), staged(2, "1f1b")), (2,)),
    "folded": (Steps(small(), staged(2, "folded", recompute="except_last")), (4,)),
}
