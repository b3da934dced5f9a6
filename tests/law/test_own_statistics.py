"""A raster normalised by its own bands: one map on any number of ranks, any grid, in every halo mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from tests.law.test_reflections import read
from tests.law.test_training_steps import alone, configuration, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism

pytestmark = pytest.mark.usefixtures("without_plots")


def request(shared: Path, name: str, normalize: str, parallel: ParallelConfig, grid: tuple[int, int]) -> Request:
    files = str(shared / f"own-{name}.tif"), str(shared / f"own-{name}-shares.tif")
    asked = parallelism(parallel)
    return Request(str(shared / "darker.tif"), *files, grid=grid, parallel=asked, verbosity=0, normalize=normalize)


@pytest.fixture(scope="module")
def expected(meshes: dict[str, Mesh], shared: Path) -> NDArray:
    """The probabilities on one rank and one tile."""

    def on_one() -> NDArray:
        with rasterio.open(shared / "image.tif") as file:
            pixels_CHW, profile, bands = file.read(), file.profile, file.colorinterp
        with rasterio.open(shared / "darker.tif", "w", photometric="minisblack", **profile) as file:
            file.colorinterp = bands
            file.write(pixels_CHW // np.arange(1, 5, dtype=np.uint8)[:, None, None])
        config = configuration(shared, shared / "own", "fp32", "adamw", None)
        run(replace(config, train=replace(config.train, epochs=1)), alone())
        mapper = checkpoint_mapper(find_checkpoint(shared / "own"))
        for normalize in ("training", "image"):
            predict(request(shared, normalize, normalize, ParallelConfig(), (1, 1)), mapper, 1 << 30, alone())
        assert not np.allclose(*(read(shared / f"own-{n}-shares.tif") for n in ("training", "image")), equal_nan=True)
        return read(shared / "own-image-shares.tif")

    return meshes["gloo"].on_root(on_one)


@pytest.mark.mpi
@pytest.mark.parametrize("halo", ["read", "exchange", "layer"])
def test_ranks_measure_together(halo: str, shared: Path, expected: NDArray, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "own")))
    predict(request(shared, halo, "image", ParallelConfig(halo=halo), (4, 4)), mapper, 1 << 30, mesh)
    mesh.communicator.barrier()
    np.testing.assert_array_equal(read(shared / f"own-{halo}-shares.tif"), expected)
