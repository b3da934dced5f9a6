"""The law over a failure: on any number of ranks and in every mode a step that no run goes on with ends all of them and
names its tile, or, where ranks share an image, the block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.law.runs import configuration, run
from tests.law.test_runs import SEVERAL, of
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig
from tiledseg.errors import TiledsegError
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.step import StepLoss

pytestmark = pytest.mark.usefixtures("without_plots")


def plant(monkeypatch: pytest.MonkeyPatch, what: str, image: int = 0) -> None:
    """A fault of the loss, on the rank of pixel (50, 30) of an image."""
    sums = StepLoss.sums

    def summed(own: StepLoss, piece: Any, sample: Sample) -> Any:
        found, (rows, cols) = sums(own, piece, sample), (piece.core.row, piece.core.col)
        if sample.image != image or not (rows.start <= 50 < rows.stop and cols.start <= 30 < cols.stop):
            return found
        zero = piece.logits_BKHW.double().sum() * 0
        more = {"gradient": zero.sqrt(), "output": zero * float("nan"), "large": zero + 1e7}[what]
        return torch.cat([found[:1] + more, found[1:]])  # the others are finite: numbers of labels

    monkeypatch.setattr(StepLoss, "sums", summed)


WORDS = {
    "output": "the loss is nan at step 1",
    "gradient": "the gradient is not finite at step 1",
    "large": "at step 1, above train.largest_loss 1000",
}


def ways(size: int) -> dict[str, ParallelConfig]:
    shared = {mode: ParallelConfig(halo=mode) for mode in ("exchange", "layer")} if size > 1 else {}
    staged = {"stages": ParallelConfig(stages=2)} if size % 2 == 0 else {}
    return {"read": ParallelConfig(), **shared, **staged}


def check(config: Config, mesh: Mesh, what: str, path: Path, step: int = 1) -> None:
    """All ranks end with one error, which names the pixel's tile; where all losses are finite, some tile."""
    with pytest.raises(TiledsegError, match=WORDS[what].replace("step 1", f"step {step}")) as raised:
        run(config, mesh)
    said = str(raised.value)
    assert is_agreed(raised.value), "rank 0 alone says it"
    assert len(set(mesh.communicator.gather_objects(said))) == 1
    assert f" of {path} have the largest" in said
    if what != "gradient":
        rows, cols = re.findall(r"(\d+):(\d+)", said)
        assert int(rows[0]) <= 50 < int(rows[1]), said
        assert int(cols[0]) <= 30 < int(cols[1]), said


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WORDS)
def test_every_rank_ends_with_the_cause(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    mesh = meshes["gloo"]
    plant(monkeypatch, what)
    for name, parallel in ways(mesh.size).items():
        config = configuration(shared, f"{what}-{name}", {"train.largest_loss": 1000.0, "parallel": parallel})
        check(config, mesh, what, shared / "image.tif")


# Of three losses of ratios, that of the pixel; of three images in blocks, two on a rank and one on the other.
RATIOS = {"train.loss": "dice", "train.tiles_per_step": 3}
TOGETHER = {**SEVERAL, "model.norm": "batch", "tiling.grid": 1, "memory.blocks": 2, "train.images_per_step": 3}


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("keys", "what", "image", "step"),
    [
        *((RATIOS, what, 0, 2) for what in ("output", "gradient")),
        *((TOGETHER | {"train.loss": "dice"}, "output", image, 1) for image in range(3)),
    ],
)
def test_the_tile_and_the_image_of_a_loss_of_ratios_are_named(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, keys: Any, what: str, image: int, step: int
) -> None:
    plant(monkeypatch, what, image)
    config = of(shared, f"{what}-{image}-{step}", keys)
    check(config, meshes["gloo"], what, shared / f"image{f'-{image}' if image else ''}.tif", step)
