"""The law for the files beside a map: probabilities as bytes, polygons, an area only, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely

from tests.law.test_training_steps import alone, configuration, run
from tests.raster.polygons_drawn import write_vectors
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism

pytestmark = pytest.mark.usefixtures("without_plots")


def request(shared: Path, name: str, halo: str, grid: tuple[int, int], area: str | None) -> Request:
    files = str(shared / f"{name}.tif"), str(shared / f"{name}-shares.tif")
    more = {"probability_type": "uint8", "polygons": str(shared / f"{name}.gpkg"), "minimum_area": "3px", "area": area}
    asked = parallelism(ParallelConfig(halo=halo))
    return Request(str(shared / "image.tif"), *files, grid=grid, precision="fp64", parallel=asked, verbosity=0, **more)


@pytest.fixture(scope="module")
def expected(meshes: dict[str, Mesh], shared: Path) -> dict[str, str | None]:
    """The area's file by its name; maps of one rank, in one tile."""

    def made() -> dict[str, str | None]:
        config = configuration(shared, shared / "mapped", "fp32", "adamw", None)
        run(replace(config, train=replace(config.train, epochs=3)), alone())
        with rasterio.open(shared / "image.tif") as file:
            left, bottom, right, top = file.bounds
        corners = [(left + 3, top - 4), (right - 5, top - 11), (left + 9, bottom + 2)]
        areas = {"all": None, "part": write_vectors(shared / "area.gpkg", [shapely.Polygon(corners)], "EPSG:32633")}
        mapper = checkpoint_mapper(find_checkpoint(shared / "mapped"))
        for name, area in areas.items():
            predict(request(shared, f"{name}-alone", "read", (1, 1), area), mapper, 1 << 30, alone())
        return areas

    return meshes["gloo"].on_root(made)


def polygons(path: Path) -> list[tuple[bytes, object, ...]]:
    _, _, shapes, fields = pyogrio.raw.read(path)
    normal = shapely.to_wkb(shapely.normalize(shapely.from_wkb(shapes)))
    return sorted(zip(normal, *(field.tolist() for field in fields), strict=True))


@pytest.mark.mpi
@pytest.mark.parametrize("halo", ["read", "exchange", "layer"])
@pytest.mark.parametrize("area", ["all", "part"])
def test_the_files_beside_a_map_are_those_of_one_rank(
    area: str, halo: str, shared: Path, expected: dict[str, str | None], meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["gloo"]
    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "mapped")))
    name = f"{area}-{halo}"
    predict(request(shared, name, halo, (4, 4), expected[area]), mapper, 1 << 30, mesh)
    mesh.communicator.barrier()
    for end in (".tif", "-shares.tif"):
        assert (shared / f"{name}{end}").read_bytes() == (shared / f"{area}-alone{end}").read_bytes()
    found = polygons(shared / f"{name}.gpkg")
    assert found == polygons(shared / f"{area}-alone.gpkg")
    with rasterio.open(shared / f"{name}.tif") as file:
        valid = np.count_nonzero(file.read(1) != 255)
    assert len(found) > 20
    assert valid == 70 * 57 - 30 if area == "all" else 300 < valid < 2000
