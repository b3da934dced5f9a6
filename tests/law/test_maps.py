"""The law for maps and the files beside them: those of one rank and one tile, whatever the ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import rasterio
import shapely

from tests.conftest import SIZE
from tests.law.cases import one_rank
from tests.law.fixed_size import SIDE, fixed_size
from tests.law.runs import configuration, run
from tests.law.test_steps import marks
from tests.small_files import read_raster, write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, DataConfig, ParallelConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.inference.predictor import predict_all
from tiledseg.inference.request import Request
from tiledseg.inference.trained import Mapper, checkpoint_mapper, module_mapper

pytestmark = pytest.mark.usefixtures("without_plots")
CORNERS = [(500003, 4999996), (500023.5, 4999989), (500009, 4999967)]
POLYGONS = {"polygons": "map.gpkg"}
VIEWS = {
    "reflections": [(1, 0), (-1, 0), (1, 2), (-1, 2)],  # which way the columns go, and quarter turns
    "turns": [(cols, quarters) for cols in (1, -1) for quarters in range(4)],
}


class Row(NamedTuple):
    """A map's flags, how ranks share it, and the numbers of ranks that show something of their own. `crops`: those by
    which a module of one input size maps, in place of the trained network."""

    ranks: tuple[int, ...]
    how: dict[str, Any]
    asked: dict[str, Any]
    grid: tuple[int, int] = (4, 4)
    crops: CropGrid | None = None


def staged(count: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"stages": count, "schedule": schedule, "balance": "modelled", **more}


ROWS = {
    "read": Row((4,), {}, POLYGONS),
    "turns": Row((3,), {}, {"views": "turns"}, (3, 4)),
    "own values and an area": Row((2,), {}, {**POLYGONS, "normalize": "image", "area": "part.gpkg"}),
    "exchange": Row((2,), {"halo": "exchange"}, {**POLYGONS, "normalize": "image"}),
    "exchange, area": Row((3,), {"halo": "exchange"}, {**POLYGONS, "area": "part.gpkg"}, (3, 3)),
    "layer": Row((4,), {"halo": "layer"}, {**POLYGONS, "area": "part.gpkg"}),
    "layer, own values": Row((3,), {"halo": "layer"}, {"normalize": "image"}),
    "fused": Row((2,), {"halo": "layer", "fusion": 3}, POLYGONS),
    "stages": Row((2,), staged(2), {"views": "reflections"}, (4, 3)),
    "three stages": Row((3,), staged(3, "gpipe"), POLYGONS),
    "folded": Row((2,), staged(2, "folded"), {"area": "part.gpkg"}),
    "stages of exchange": Row((4,), staged(2, halo="exchange", mesh=[2, 1]), POLYGONS),
    "crops, whole": Row((3,), {}, {}, (1, 1), CropGrid(SIDE)),
    "crops": Row((2, 9), {}, {}, (3, 3), CropGrid(SIDE)),
    "crops, many tiles": Row((3, 9), {}, {}, (5, 9), CropGrid(SIDE)),
    "crops, mirrored": Row((2,), {"halo": "exchange"}, {}, (2, 4), CropGrid(SIDE, 0.4, "cosine", "mirrored")),
    "crops, centre": Row((2, 4), {}, {}, (4, 3), CropGrid(SIDE, 0.6, "centre")),
    "crops, turns": Row((3,), {}, {"views": "turns"}, (3, 4), CropGrid(SIDE, 0.5, "mean")),
    "folded layer": Row((4,), staged(2, "folded", halo="layer", mesh=[2, 1]), {"normalize": "image"}),
}


@pytest.fixture(scope="module")
def trained(meshes: dict[str, Mesh], shared: Path) -> Path:
    """A run of one rank; an image of other light than its own; an area of part of it. Collective."""

    def made() -> Path:
        from tests.raster.polygons_drawn import write_vectors

        run(configuration(shared, "mapped", {"train.epochs": 3}), one_rank())
        with rasterio.open(shared / "image.tif") as file:
            pixels_CHW, place = file.read(), {"crs": file.crs, "transform": file.transform}
        darker_CHW = pixels_CHW // np.arange(1, 5, dtype=np.uint8)[:, None, None]
        write_raster(shared / "darker.tif", darker_CHW, nodata=0, **place)
        write_vectors(shared / "part.gpkg", [shapely.Polygon(CORNERS)], "EPSG:32633")
        return shared / "mapped"

    return meshes["gloo"].on_root(made)


def network_of(trained: Path) -> Mapper:
    return checkpoint_mapper(find_checkpoint(trained))


def config_of(grid: tuple[int, int], precision: str, **groups: Any) -> Config:
    tiling, train, silent = TilingConfig(list(grid)), TrainConfig(precision=precision), RunConfig(verbosity=0)
    return Config(tiling=tiling, train=train, run=silent, **groups)


def mapped(trained: Path, name: str, row: Row, mesh: Mesh) -> None:
    """A map of classes and one of shares. Collective."""
    shared, asked = trained.parent, dict(row.asked)
    for key in ("polygons", "area"):
        if key in asked:
            asked[key] = str(shared / (f"{name}.gpkg" if key == "polygons" else asked[key]))
    image = shared / ("darker.tif" if "normalize" in asked else "image.tif")
    files = (str(shared / f"{name}{end}.tif") for end in ("", "-shares"))
    precision = "fp32" if row.crops else "fp64"  # of crops, the order of sums shows so
    data = DataConfig(area=asked.pop("area", None))
    config = config_of(row.grid, precision, parallel=ParallelConfig(**row.how), data=data)
    request = Request(str(image), *files, config=config, **asked)
    mapper = module_mapper(fixed_size(bands=4, classes=3), 4, crops=row.crops) if row.crops else network_of(trained)
    predict_all([request], mapper, 1 << 30, mesh)
    mesh.communicator.barrier()


def polygons(path: Path) -> list[Any]:
    import pyogrio

    _, _, shapes, fields = pyogrio.raw.read(path)
    normal = shapely.to_wkb(shapely.normalize(shapely.from_wkb(shapes)))
    return sorted(zip(normal, *(field.tolist() for field in fields), strict=True))


@pytest.mark.mpi
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(row.ranks)) for name, row in ROWS.items()])
def test_a_map_is_that_of_one_rank_and_one_tile(name: str, trained: Path, meshes: dict[str, Mesh]) -> None:
    """Classes byte for byte; shares to rounding, of crops to the bit. Polygons are the same set."""
    row, mesh, shared = ROWS[name], meshes["gloo"], trained.parent
    if SIZE not in row.ranks:
        pytest.skip(f"not for {SIZE} ranks")
    mapped(trained, name, row, mesh)
    mesh.on_root(lambda: mapped(trained, f"{name} alone", row._replace(how={}, grid=(1, 1)), one_rank()))
    ours, theirs = shared / name, shared / f"{name} alone"
    assert ours.with_name(f"{name}.tif").read_bytes() == theirs.with_name(f"{name} alone.tif").read_bytes()
    shares, expected = (read_raster(path.with_name(f"{path.name}-shares.tif")) for path in (ours, theirs))
    np.testing.assert_allclose(shares, expected, rtol=0 if row.crops else 3e-7, atol=0)
    if "polygons" in row.asked:
        found = polygons(shared / f"{name}.gpkg")
        assert found == polygons(shared / f"{name} alone.gpkg")
        assert len(found) > 20
    valid = np.count_nonzero(read_raster(shared / f"{name}.tif") != 255)
    assert 300 < valid < 2000 if "area" in row.asked else 70 * 57 - 100 < valid <= 70 * 57 - 30


@pytest.mark.parametrize("views", VIEWS)
def test_the_mean_is_that_of_the_maps_of_changed_files(views: str, trained: Path) -> None:
    """70 x 57 pixels and 57 x 70: no multiples of the alignment of 4."""
    shared, pixels_CHW, total = trained.parent, read_raster(trained.parent / "image.tif"), 0.0
    for number, (cols, quarters) in enumerate(VIEWS[views]):
        changed_CHW = np.ascontiguousarray(np.rot90(pixels_CHW[:, :, ::cols], quarters, (1, 2)))
        path = shared / f"{views}-{number}-image.tif"
        write_raster(path, changed_CHW, nodata=0, crs=None, transform=None)
        files = (str(shared / f"{views}-{number}{end}.tif") for end in ("", "-shares"))
        request = Request(str(path), *files, config=config_of((1, 1), "fp64"))
        predict_all([request], network_of(trained), 1 << 30, one_rank())
        shares_KHW = read_raster(shared / f"{views}-{number}-shares.tif").astype(np.float64)
        total = total + np.rot90(shares_KHW, -quarters, (1, 2))[:, :, ::cols]
    mapped(trained, views, Row((), {}, {"views": views}, (1, 1)), one_rank())
    shares_KHW, classes_HW = read_raster(shared / f"{views}-shares.tif"), read_raster(shared / f"{views}.tif")[0]
    expected_KHW = (total / len(VIEWS[views])).astype(np.float32)
    np.testing.assert_allclose(shares_KHW, expected_KHW, rtol=3e-7, atol=1e-9)
    valid_HW = ~np.isnan(expected_KHW).any(0)
    assert 0 < (~valid_HW).sum() < 100
    assert (classes_HW[~valid_HW] == 255).all()
    assert (classes_HW[valid_HW] == expected_KHW.argmax(0)[valid_HW]).mean() > 0.9999
    assert not np.allclose(shares_KHW, read_raster(shared / f"{views}-0-shares.tif"), atol=1e-3, equal_nan=True)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_views_of_an_image_that_ranks_share_are_refused(trained: Path, meshes: dict[str, Mesh]) -> None:
    row = Row((), {"halo": "exchange"}, {"views": "turns"}, (3, 4))
    with pytest.raises(ConfigError, match=r"--tta is turns, .*, but --parallel.halo is exchange; use --parallel.halo"):
        mapped(trained, "refused", row, meshes["gloo"])
    assert not (trained.parent / "refused.tif").exists()
