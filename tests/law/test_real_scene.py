"""The law on real imagery: a window of a city trained in every halo mode gives one loss line and one map.

Skipped by name where ../shared/data/naip-trees is not there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import rasterio
import torch
from rasterio.windows import Window

from tests.law.test_training_steps import alone, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TilingConfig,
    TrainConfig,
)
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "naip-trees"
FILES = {word: FOLDER / f"santa_monica_2020_{word}.tif" for word in ("image", "trees")}
WINDOW = Window(col_off=700, row_off=1100, width=333, height=291)  # sides that divide by nothing; trees and roads
MODES = {
    "read": ParallelConfig(),
    "exchange": ParallelConfig(halo="exchange"),
    "layer": ParallelConfig(halo="layer"),
    "fused": ParallelConfig(halo="layer", fusion=3),
}
STEPS = 6

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("without_plots"),
    pytest.mark.skipif(not all(path.exists() for path in FILES.values()), reason="no shared/data/naip-trees"),
]


def cut(source: Path, target: Path, bands: list[int]) -> None:
    """The window as a raster of its own, the bands as data (in the mosaic the fourth is marked as alpha)."""
    with rasterio.open(source) as file:
        pixels_CHW = file.read(bands, window=WINDOW)
        crs, transform = file.crs, file.window_transform(WINDOW)
    count, height, width = pixels_CHW.shape
    options = {"driver": "GTiff", "count": count, "height": height, "width": width, "dtype": "uint8"}
    with rasterio.open(target, "w", crs=crs, transform=transform, photometric="minisblack", **options) as file:
        file.write(pixels_CHW)
        file.colorinterp = [rasterio.enums.ColorInterp.gray] + [rasterio.enums.ColorInterp.undefined] * (count - 1)


def configuration(folder: Path, parallel: ParallelConfig, output: str) -> Config:
    image, labels = str(folder / "image.tif"), str(folder / "trees.tif")
    return Config(
        data=DataConfig([image], [labels], [image], [labels], classes=2),
        tiling=TilingConfig(grid=4),
        model=ModelConfig(levels=3, base_channels=4, dropout=0.1),
        optimizer=OptimizerConfig(name="adamw", lr=0.01, policy="constant"),
        train=TrainConfig(epochs=STEPS, precision="fp64", validate_every=3),
        parallel=parallel,
        run=RunConfig(output=str(folder / output), verbosity=0),
    )


@pytest.fixture(scope="module")
def scene(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all ranks with the window in it."""
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path_factory.mktemp("naip"))))
    mesh.on_root(lambda: cut(FILES["image"], folder / "image.tif", [1, 2, 3, 4]))
    mesh.on_root(lambda: cut(FILES["trees"], folder / "trees.tif", [1]))
    return folder


@pytest.fixture(scope="module")
def reference(meshes: dict[str, Mesh], scene: Path) -> list[dict]:
    """The undivided run: one rank, one tile."""
    whole = replace(configuration(scene, ParallelConfig(), "whole"), tiling=TilingConfig(grid=1))
    return meshes["gloo"].on_root(lambda: run(whole, alone()))


RANKS = {"read": (1, 2, 4), "exchange": (2, 4), "layer": (3, 4), "fused": (2,)}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.ranks(*RANKS.get(mode, (2, 3, 4)))) for mode in MODES]
)
def test_every_mode_has_the_loss_line_of_the_undivided_run(
    mode: str, scene: Path, reference: list[dict], meshes: dict[str, Mesh]
) -> None:
    found = run(configuration(scene, MODES[mode], mode), meshes["gloo"])
    lines = [[line["loss"] for line in run if "loss" in line] for run in (found, reference)]
    assert len(lines[1]) == STEPS
    assert lines[1][-1] < 0.9 * lines[1][0], "the network learns, so the comparison says something"
    assert lines[0] == pytest.approx(lines[1], rel=1e-10)
    checks = [[line["val"]["loss"] for line in run if "val" in line] for run in (found, reference)]
    assert checks[0] == pytest.approx(checks[1], rel=1e-10)


def test_every_mode_makes_the_undivided_map(scene: Path, reference: list[dict], meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    checkpoint = mesh.on_root(lambda: find_checkpoint(str(scene / "whole")))

    def mapped(name: str, grid: tuple[int, int], parallel: ParallelConfig, mesh: Mesh) -> bytes:
        output = scene / f"{name}.tif"
        asked = parallelism(parallel)
        request = Request(str(scene / "image.tif"), str(output), None, grid, "fp64", asked, verbosity=0)
        predict(request, checkpoint_mapper(checkpoint), 1 << 30, mesh)
        mesh.communicator.barrier()
        return output.read_bytes()

    expected = mesh.on_root(lambda: mapped("map", (1, 1), ParallelConfig(), alone()))
    for mode, parallel in MODES.items():
        assert mapped(f"map-{mode}", (4, 4), parallel, mesh) == expected, mode
