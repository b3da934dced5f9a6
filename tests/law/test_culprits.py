"""The law over a failure: on any number of ranks and in every mode a step that no run goes on with names the same cause
and its tile, or, where ranks share an image, the block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.law.runs import configuration, run
from tests.law.test_runs import SEVERAL, of
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig
from tiledseg.errors import TiledsegError
from tiledseg.geometry.box import Box
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.training.step_loss import StepLoss

PLACE = (50, 30)  # the row and column of the pixel that everything begins with
pytestmark = pytest.mark.usefixtures("without_plots")


def holds(box: Box) -> bool:
    return box.row.start <= PLACE[0] < box.row.stop and box.col.start <= PLACE[1] < box.col.stop


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A fault at the place, on the rank that has it."""
    load, sums = Dataset.load, StepLoss.sums

    def loaded(*arguments: Any, **options: Any) -> Sample:
        sample = load(*arguments, **options)
        context = sample.tile.context
        if not holds(sample.tile.core) or not sample.x_CHW.size:
            return sample
        x_CHW = sample.x_CHW.copy()
        x_CHW[0, PLACE[0] - context.row.start, PLACE[1] - context.col.start] = np.nan
        return replace(sample, x_CHW=x_CHW)

    def summed(own: StepLoss, piece: Any, sample: Sample) -> Any:
        found = sums(own, piece, sample)
        if not holds(piece.core):
            return found
        zero = piece.logits_BKHW.double().sum() * 0
        first = torch.eye(1, len(found), dtype=found.dtype)[0]
        return found + first * {"gradient": zero.sqrt(), "output": zero * float("nan"), "large": zero + 1e7}[what]

    if what == "input":
        monkeypatch.setattr(Dataset, "load", loaded)
    else:
        monkeypatch.setattr(StepLoss, "sums", summed)


WORDS = {
    "input": "whose input is not finite",
    "output": "but the network's output is not",
    "gradient": "whose loss is finite, but its gradient is not",
    "large": "above train.largest_loss 1000",
}


def ways(size: int) -> dict[str, ParallelConfig]:
    shared = {mode: ParallelConfig(halo=mode) for mode in ("exchange", "layer")} if size > 1 else {}
    staged = {"stages": ParallelConfig(stages=2)} if size % 2 == 0 else {}
    return {"read": ParallelConfig(), **shared, **staged}


def fail(config: Config, mesh: Mesh) -> str:
    with pytest.raises(TiledsegError) as raised:
        run(config, mesh)
    assert is_agreed(raised.value), "rank 0 alone says it"
    assert len(set(mesh.communicator.gather_objects(str(raised.value)))) == 1
    return str(raised.value)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WORDS)
def test_the_tile_is_named(shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    mesh = meshes["gloo"]
    plant(monkeypatch, what)
    for name, parallel in ways(mesh.size).items():
        config = configuration(shared, f"{what}-{name}", {"train.largest_loss": 1000.0, "parallel": parallel})
        said = fail(config, mesh)
        assert "at step 1" in said, said
        assert WORDS[what] in said, f"{name}: {said}"
        assert named_box(said, str(shared / "image.tif")), f"{name}: {said}"


def named_box(said: str, path: str) -> bool:
    """Whether the rows and columns that are named hold the place."""
    before, _, _ = said.partition(f" of {path}")
    rows, cols = before.rpartition("rows ")[2].split(", columns ")
    (top, bottom), (left, right) = ((int(at) for at in span.split(":")) for span in (rows, cols))
    return top <= PLACE[0] < bottom and left <= PLACE[1] < right


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_loss_of_ratios_and_a_norm_over_the_step(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums are those of all ranks: nobody waits for a rank that has come to its end."""
    mesh = meshes["gloo"]
    plant(monkeypatch, "gradient")
    said = fail(configuration(shared, "ratios", {"train.loss": "dice", "train.tiles_per_step": 3}), mesh)
    assert named_box(said, str(shared / "image.tif")), said
    keys = {**SEVERAL, "model.norm": "batch", "tiling.grid": 1, "train.loss": "dice", "memory.blocks": 2}
    said = fail(of(shared, "together", {**keys, "train.images_per_step": 3}), mesh)
    path = next(str(shared / f"image{end}.tif") for end in ("", "-1", "-2") if f"image{end}.tif" in said)
    assert named_box(said, path), "two images on a rank, one on the other, in blocks"
