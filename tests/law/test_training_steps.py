"""The law over time: thirty optimizer steps give the same loss line on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch

from tests.law.validations import check_validations
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.training.start import start

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")
STEPS = 30
FEW = 12  # steps of the runs that other files compare


def write_scene(folder: Path) -> None:
    """Noise with a pattern that can be learned, 70 x 57 pixels, some without data."""
    draw = np.random.default_rng(8)
    labels_HW = (np.add.outer(np.arange(70) // 9, np.arange(57) // 7) % 3).astype(np.uint8)
    image_CHW = draw.integers(0, 90, (4, 70, 57)) + 50 * labels_HW
    image_CHW[:, :5, :6] = 0
    options = {"driver": "GTiff", "height": 70, "width": 57, "crs": "EPSG:32633"}
    options["transform"] = rasterio.transform.from_origin(500000, 5000000, 0.5, 0.5)
    with rasterio.open(
        folder / "image.tif", "w", count=4, dtype="uint8", nodata=0, photometric="minisblack", **options
    ) as f:
        f.write(image_CHW.astype(np.uint8))
        f.colorinterp = [rasterio.enums.ColorInterp.gray] + [rasterio.enums.ColorInterp.undefined] * 3
    with rasterio.open(folder / "labels.tif", "w", count=1, dtype="uint8", **options) as f:
        f.write(labels_HW, 1)


def configuration(
    folder: Path, output: Path, precision: str, optimizer: str, tiles_per_step: int | None, steps: int = FEW
) -> Config:
    image, labels = str(folder / "image.tif"), str(folder / "labels.tif")
    epochs = steps if tiles_per_step is None else steps // 2  # 9 tiles in steps of 5: two steps an epoch
    return Config(
        data=DataConfig([image], [labels], [image], [labels], classes=3),
        tiling=TilingConfig(grid=3),
        model=ModelConfig(levels=3, base_channels=4, dropout=0.2),
        optimizer=OptimizerConfig(name=optimizer, lr=0.002, policy="cosine", warmup_steps=3, clip_norm=5.0),
        train=TrainConfig(epochs=epochs, tiles_per_step=tiles_per_step, precision=precision, validate_every=steps // 3),
        run=RunConfig(output=str(output), verbosity=0),
    )


def losses(lines: list[dict]) -> list[float]:
    """Of the steps among a run's metrics."""
    return [line["loss"] for line in lines if "loss" in line]


def run(config: Config, mesh: Mesh) -> list[dict]:
    """Train on `mesh`; the metrics, on every rank."""
    assert start(config, to_yaml(config), mesh) == 0
    mesh.communicator.barrier()
    lines = (Path(config.run.output) / "metrics.jsonl").read_text().splitlines()
    mesh.communicator.barrier()  # a test may go on with another run into the same folder
    return [json.loads(line) for line in lines]


def alone() -> Mesh:
    return Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("optimizer", "tiles_per_step", "precision", "bound"),
    [
        pytest.param("adamw", None, "fp64", 1e-10, marks=pytest.mark.ranks(2, 4)),
        pytest.param("adamw", None, "fp32", 1e-5, marks=pytest.mark.ranks()),
        pytest.param("sgd", 5, "fp64", 1e-10, marks=pytest.mark.ranks(1, 3)),
        pytest.param("sgd", 5, "fp32", 1e-5, marks=pytest.mark.ranks(2, 4)),
    ],
)
def test_thirty_steps_give_the_loss_line_of_one_rank(
    precision: str, bound: float, optimizer: str, tiles_per_step: int | None, mesh: Mesh, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    shared = Path(mesh.communicator.broadcast_object(str(tmp_path)))
    mesh.on_root(lambda: write_scene(shared))
    config = configuration(shared, shared / "shared-run", precision, optimizer, tiles_per_step, STEPS)
    found = run(config, mesh)
    own = replace(config, run=RunConfig(output=str(shared / "alone"), verbosity=0))
    expected = mesh.on_root(lambda: run(own, alone()))

    losses = [line["loss"] for line in expected if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < 0.95 * losses[0], "the network learns, so the comparison says something"
    assert [line["loss"] for line in found if "loss" in line] == pytest.approx(losses, rel=bound)
    checks = [(a["val"], b["val"]) for a, b in zip(found, expected, strict=True) if "val" in a]
    assert len(checks) >= 1
    for mine, theirs in checks:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=bound)
        assert mine["mean_iou"] == pytest.approx(theirs["mean_iou"], abs=1e-3 if precision == "fp32" else 1e-12)
    if precision == "fp64":
        check_validations(shared / "shared-run", shared / "alone")
