"""Polygons of a class map in a GeoPackage (`tests/test_predict.py` compares them with the map)."""

from pathlib import Path

import numpy as np
import pytest
import shapely
from rasterio.features import rasterize

from tests.raster.polygons_drawn import write_vectors
from tests.raster.test_georeferencing import TURNED
from tests.raster.test_writer import UTM, Info
from tests.small_files import write_raster
from tiledseg.errors import OutputError
from tiledseg.raster.geopackage import JOURNALS, polygons_output, write_polygons
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.labels.polygons import read_polygons
from tiledseg.system.outputs import unfinished


@pytest.mark.parametrize("values", [(0, 1, 2), (0, 0, 0, 3, 255), (255,)])
def test_polygons_are_read_as_labels_and_cover_each_pixel_with_data_once(
    tmp_path: Path, values: tuple[int, ...]
) -> None:
    """Areas that touch at a corner are two."""
    classes_HW = np.random.default_rng(3).choice(values, (37, 41)).astype(np.uint8)
    write_raster(tmp_path / "plain.tif", classes_HW[None], crs=UTM, transform=TURNED)
    info = Info(37, 41, transform=TURNED)
    with unfinished(tmp_path / "p.gpkg") as output:
        write_polygons(output, tmp_path / "plain.tif", info, default_classes(4), {0, 1, 2, 3})
        assert not (tmp_path / "p.gpkg").exists(), "an unfinished file has another name"
        output.publish(JOURNALS)
    areas, pixels = (read_polygons(str(tmp_path / "p.gpkg"), info, attribute=key) for key in ("class", "pixels"))
    assert shapely.is_valid(areas.shapes).all()
    np.testing.assert_allclose(shapely.area(areas.shapes), pixels.values or [])
    assert sum(pixels.values or []) == (classes_HW != 255).sum()
    upright = shapely.transform(areas.shapes, lambda points: points * [1, -1])
    upright = shapely.transform(upright, lambda points: points.round(3))
    burnt = [(shapely.box(-9, -9, -8, -8), 0), *zip(upright, areas.values or [], strict=True)]
    np.testing.assert_array_equal(rasterize(burnt, (37, 41), fill=255, dtype=np.uint8), classes_HW)
    polygons_output("--polygons", tmp_path / "p.gpkg")  # may be replaced


def test_a_layer_of_other_fields_is_somebodys_and_stays(tmp_path: Path) -> None:
    """A file of ours is replaced, as maps are; one whose layer has our name alone is refused."""
    square, path = [shapely.box(0, 0, 1, 1)], tmp_path / "classes.gpkg"
    write_vectors(path, square, "EPSG:4326", **{"class": [1], "name": [1], "pixels": [1]})
    assert polygons_output("--polygons", path).path == path
    path.unlink()
    write_vectors(path, square, "EPSG:4326", **{"class": [1], "owner": [1]})
    with pytest.raises(OutputError, match="holds the layer classes, which would be lost"):
        polygons_output("--polygons", path)
