"""Polygons of a class map, read back from the GeoPackage: they are the map's areas, each pixel once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyogrio
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rasterio.features import rasterize

from tests.raster.polygons_drawn import write_vectors
from tests.raster.test_writer import PLACE, UTM, Info
from tests.small_files import write_raster
from tiledseg.errors import OutputError
from tiledseg.raster.geopackage import JOURNALS, polygons_output, write_polygons
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.labels.polygons import read_polygons
from tiledseg.system.outputs import unfinished

LEGEND = default_classes(4)


def polygons_of(folder: Path, classes_HW: NDArray[np.uint8]) -> tuple[NDArray, NDArray, NDArray]:
    """Outlines on the ground, class numbers and pixels."""
    write_raster(folder / "plain.tif", classes_HW[None], crs=UTM, transform=PLACE)
    with unfinished(folder / "p.gpkg") as output:
        write_polygons(output, folder / "plain.tif", Info(*classes_HW.shape), LEGEND, 255)
        assert not (folder / "p.gpkg").exists(), "an unfinished file has another name"
        output.publish(JOURNALS)
    meta, _, wkb, (numbers, names, pixels) = pyogrio.raw.read(folder / "p.gpkg", layer="classes")
    assert meta["crs"] == UTM
    assert [LEGEND[number].name for number in numbers] == list(names)
    (folder / "p.gpkg").unlink()
    return shapely.from_wkb(wkb), numbers, pixels


@st.composite
def maps(draw: st.DrawFn) -> NDArray[np.uint8]:
    """Any shape; from single pixels to patches, with and without pixels without data."""
    height, width, patch = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 5))
    values = draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 3, 255), (3,), (255,), (0, 0, 0, 0, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    coarse_HW = rng.choice(values, (-(-height // patch), -(-width // patch)))
    return np.kron(coarse_HW, np.ones((patch, patch)))[:height, :width].astype(np.uint8)


@settings(derandomize=True, max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(classes_HW=maps())
def test_polygons_cover_each_pixel_with_data_once(tmp_path: Path, classes_HW: NDArray[np.uint8]) -> None:
    found, numbers, pixels = polygons_of(tmp_path, classes_HW)
    assert shapely.is_valid(found).all()
    np.testing.assert_allclose(shapely.area(found), pixels * abs(PLACE.determinant))
    burnt = [(shapely.box(0, 0, 1, 1), 255), *zip(found, numbers, strict=True)]  # rasterize takes no empty list
    back_HW = rasterize(burnt, classes_HW.shape, fill=255, dtype=np.uint8, transform=PLACE)
    np.testing.assert_array_equal(back_HW, classes_HW)
    assert pixels.sum() == (classes_HW != 255).sum()


def test_areas_that_touch_at_a_corner_are_two(tmp_path: Path) -> None:
    _, numbers, pixels = polygons_of(tmp_path, np.array([[1, 0], [0, 1]], np.uint8))
    assert sorted(zip(numbers, pixels, strict=True)) == [(0, 1), (0, 1), (1, 1), (1, 1)], "they touch at a corner"


def test_labels_read_the_polygons_of_a_map(tmp_path: Path) -> None:
    write_raster(tmp_path / "plain.tif", np.arange(4, dtype=np.uint8).reshape(1, 2, 2), crs=UTM, transform=PLACE)
    with unfinished(tmp_path / "p.gpkg") as output:
        write_polygons(output, tmp_path / "plain.tif", Info(2, 2), LEGEND, 255)
        output.publish(JOURNALS)
    polygons = read_polygons(str(tmp_path / "p.gpkg"), Info(2, 2), attribute="class")
    assert sorted(polygons.values or ()) == [0, 1, 2, 3]
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
