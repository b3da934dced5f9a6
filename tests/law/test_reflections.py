"""The mean over reflections and turns: that of maps of files which hold the changed rasters, on any grid and ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from tests.law.test_training_steps import alone, configuration, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism

pytestmark = pytest.mark.usefixtures("without_plots")
CHANGES = {
    "reflections": [lambda x: x, lambda x: x[:, :, ::-1], lambda x: x[:, ::-1], lambda x: x[:, ::-1, ::-1]],
    "turns": [lambda x, k=k: np.rot90(x, k, (1, 2)) for k in range(4)]
    + [lambda x, k=k: np.rot90(x[:, ::-1], k, (1, 2)) for k in range(4)],
}
HOW = {"whole": "read", "tiles": "read", "stages": "read"}
BACK = {
    "reflections": CHANGES["reflections"],
    "turns": [lambda x, k=k: np.rot90(x, -k, (1, 2)) for k in range(4)]
    + [lambda x, k=k: np.rot90(x, -k, (1, 2))[:, ::-1] for k in range(4)],
}


def read(path: Path) -> NDArray:
    with rasterio.open(path) as file:
        return file.read()


def request(
    shared: Path, image: str, name: str, parallel: ParallelConfig, grid: tuple[int, int], views: str
) -> Request:
    files = str(shared / f"{name}-classes.tif"), str(shared / f"{name}-shares.tif")
    asked = parallelism(parallel)
    return Request(str(shared / image), *files, grid=grid, parallel=asked, verbosity=0, views=views)


@pytest.fixture(scope="module")
def expected(meshes: dict[str, Mesh], shared: Path) -> dict[str, NDArray]:
    """The mean of the maps of files, 70 x 57 pixels and 57 x 70: no multiples of the alignment of 4."""

    def by_files() -> dict[str, NDArray]:
        config = configuration(shared, shared / "seen", "fp32", "adamw", None)
        run(replace(config, train=replace(config.train, epochs=3)), alone())
        mapper = checkpoint_mapper(find_checkpoint(shared / "seen"))
        pixels_CHW, found = read(shared / "image.tif"), {}
        for kind, changes in CHANGES.items():
            total = 0
            for number, (change, back) in enumerate(zip(changes, BACK[kind], strict=True)):
                changed_CHW = np.ascontiguousarray(change(pixels_CHW))
                options = {"height": changed_CHW.shape[1], "width": changed_CHW.shape[2], "photometric": "minisblack"}
                name = f"{kind}-{number}"
                with rasterio.open(
                    shared / f"{name}.tif", "w", driver="GTiff", count=4, dtype="uint8", nodata=0, **options
                ) as file:
                    file.write(changed_CHW)
                predict(
                    request(shared, f"{name}.tif", name, ParallelConfig(), (1, 1), "none"), mapper, 1 << 30, alone()
                )
                total = total + back(read(shared / f"{name}-shares.tif")).astype(np.float64)
            found[kind] = (total / len(changes)).astype(np.float32)
        return found

    return meshes["gloo"].on_root(by_files)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "how"), [(kind, how) for kind in CHANGES for how in HOW if kind == "turns" or HOW[how] == "read"]
)
def test_the_mean_is_that_of_the_changed_rasters(
    kind: str, how: str, shared: Path, expected: dict[str, NDArray], meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["gloo"]
    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "seen")))
    grid = (1, 1) if how == "whole" else (3, 4)
    stages = min(mesh.size, 2) if how.endswith("stages") else 1
    parallel = ParallelConfig(halo=HOW[how], stages=stages, idle_ranks=stages > 1)
    name = f"{kind}-{how.replace(' ', '-')}"
    predict(request(shared, "image.tif", name, parallel, grid, kind), mapper, 1 << 30, mesh)
    mesh.communicator.barrier()
    shares_KHW, classes_HW = read(shared / f"{name}-shares.tif"), read(shared / f"{name}-classes.tif")[0]
    np.testing.assert_allclose(shares_KHW, expected[kind], rtol=3e-7, atol=1e-9)
    valid_HW = ~np.isnan(expected[kind]).any(0)
    assert 0 < (~valid_HW).sum() < 100
    assert (classes_HW[~valid_HW] == 255).all()
    assert (classes_HW[valid_HW] == expected[kind].argmax(0)[valid_HW]).mean() > 0.9999
    assert not np.allclose(shares_KHW, read(shared / "reflections-0-shares.tif"), atol=1e-3, equal_nan=True)
    if how != "whole":
        assert np.array_equal(shares_KHW, read(shared / f"{kind}-whole-shares.tif"), equal_nan=True)


@pytest.mark.mpi
def test_ranks_that_share_an_image_are_refused(
    shared: Path, expected: dict[str, NDArray], meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["gloo"]
    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "seen")))
    shares = request(shared, "image.tif", "refused", ParallelConfig(halo="exchange"), (3, 4), "turns")
    with pytest.raises(ConfigError, match=r"--tta is turns, .*, but --parallel.halo is exchange; use --parallel.halo"):
        predict(shares, mapper, 1 << 30, mesh)
    assert not (shared / "refused-classes.tif").exists()
