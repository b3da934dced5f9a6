"""Polygons: labels as what shapely says of each pixel's centre, by tiles and whole, in every format; classes of a map
in a GeoPackage (`tests/test_predict.py` compares them with the map)."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.features
import rasterio.warp
import shapely
from affine import Affine
from rasterio.features import rasterize
from rasterio.warp import transform_geom

from tests.answers import refusal
from tests.raster.polygons_drawn import expected, image_info, write_vectors
from tests.raster.test_writer import Info
from tests.small_files import write_raster
from tiledseg.errors import ConfigError, InputError, OutputError, RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.geopackage import JOURNALS, polygons_output, write_polygons
from tiledseg.raster.labels.classes import default_classes
from tiledseg.raster.labels.label_map import LabelMap, read_labels
from tiledseg.raster.labels.pair_reading import PairReading
from tiledseg.raster.labels.polygons import read_polygons
from tiledseg.system.outputs import unfinished

UTM = "EPSG:32611"
PLACE = Affine(0.5, 0, 350000, 0, -0.5, 3770000)
TURNED = Affine(0.48, 0.14, 350000, 0.14, -0.48, 3770000)
SHAPE = 300, 410
CLASSES = [
    {"name": "ground", "values": ["lawn", 0]},
    {"name": "road", "values": ["street", "path", 1]},
    {"name": "roof", "value": 2},
    {"name": "cloud", "ignored": True, "values": ["cloud", 9]},
]
WORDS = {"lawn": 0, "street": 1, "path": 1, "roof": 2, "cloud": 255}


def drawn_shapes(seed: int, count: int = 40) -> list[Any]:
    """Polygons with holes, and some of several parts, over the image and its border, in its CRS."""
    generator = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        x, y = 350000 + generator.uniform(-20, 225), 3770000 - generator.uniform(-20, 170)
        round_one = shapely.Point(x, y).buffer(generator.uniform(2, 30), quad_segs=int(generator.integers(1, 9)))
        hole = shapely.Point(x + 1, y + 1).buffer(generator.uniform(0.5, 8), quad_segs=3)
        other = shapely.Point(x + 70, y).buffer(generator.uniform(1, 12), quad_segs=2)
        shapes.append(
            shapely.union(round_one, other) if generator.random() < 0.3 else shapely.difference(round_one, hole)
        )
    return [shapely.MultiPolygon([s]) if s.geom_type == "Polygon" else s for s in shapes if not s.is_empty]


def reading(attribute: str | None = "kind", background: Any = "ground", layer: str | None = None) -> PairReading:
    of = {"label_layer": layer, "label_attribute": attribute, "background": background}
    return PairReading(LabelMap.from_config(CLASSES), **of)


@pytest.fixture
def info(tmp_path: Path) -> Any:
    return image_info(tmp_path / "image.tif", PLACE, SHAPE, UTM)


@pytest.mark.parametrize("ending", [".gpkg", ".geojson", ".shp", ".fgb"])
def test_each_format_draws_what_shapely_says(tmp_path: Path, ending: str) -> None:
    """Text and numbers as attributes; holes, several parts, overlaps in the file's order, a null geometry; a turned
    grid. GeoJSON is in degrees: its vertices are transformed one by one."""
    shapes = drawn_shapes(3)
    words = np.random.default_rng(1).choice(list(WORDS), len(shapes)).tolist()
    info = image_info(tmp_path / "image.tif", TURNED, SHAPE, UTM)
    written, crs = shapes, UTM
    if ending == ".geojson":
        crs = "EPSG:4326"
        written = [shapely.geometry.shape(transform_geom(UTM, crs, s.__geo_interface__, precision=15)) for s in shapes]
    path = write_vectors(tmp_path / f"roads{ending}", [*written, None], crs, kind=[*words, "lawn"])
    wanted = expected(shapes, [WORDS[word] for word in words], 0, info)
    assert len(np.unique(wanted)) == 4
    with reading().open_labels(path, info) as labels:
        found = read_labels(labels, reading().label_map, Box.of_shape(SHAPE))
    assert np.count_nonzero(found != wanted) <= (2 if ending == ".geojson" else 0)  # degrees round vertices
    codes = {"lawn": 0, "street": 1, "path": 1, "roof": 2, "cloud": 9}
    kind = {".shp": str, ".fgb": float}.get(ending, int)
    numbers = write_vectors(tmp_path / f"codes{ending}", written, crs, code=[kind(codes[word]) for word in words])
    with reading("code").open_labels(numbers, info) as labels:
        np.testing.assert_array_equal(read_labels(labels, reading().label_map, Box.of_shape(SHAPE)), found)
    with PairReading(LabelMap.from_config(2), background=0).open_labels(numbers, info) as labels:  # all of one class
        covered = expected(shapes, [1] * len(shapes), 0, info)
        assert np.count_nonzero(labels.read(Box.of_shape(SHAPE))[0][0] != covered) <= (2 if ending == ".geojson" else 0)


@pytest.mark.parametrize("ids", [(2, 1), ("b", "a"), (None, None)], ids=str)
def test_the_last_of_a_geojson_is_on_top_whatever_its_id(tmp_path: Path, ids: tuple[Any, Any]) -> None:
    left, top = PLACE.c, PLACE.f
    boxes = [shapely.box(left + a, top - 10, left + b, top) for a, b in ((0, 6), (2, 8))]
    features = [
        {"type": "Feature", "properties": {"kind": kind}, "geometry": box.__geo_interface__}
        | ({} if number is None else {"id": number})
        for box, kind, number in zip(boxes, ("street", "roof"), ids, strict=True)
    ]
    crs = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:{UTM.replace(':', '::')}"}}
    (tmp_path / "a.geojson").write_text(json.dumps({"type": "FeatureCollection", "crs": crs, "features": features}))
    info = image_info(tmp_path / "image.tif", PLACE, SHAPE, UTM)
    with reading().open_labels(str(tmp_path / "a.geojson"), info) as labels:
        found = read_labels(labels, reading().label_map, Box.of_shape(SHAPE))
    np.testing.assert_array_equal(found, expected(boxes, [WORDS["street"], WORDS["roof"]], 0, info))


def test_what_passes_180_degrees_is_refused(tmp_path: Path) -> None:
    """Its vertices, brought to degrees one by one, lie on both ends of the world."""
    xs, ys = rasterio.warp.transform("EPSG:4326", "EPSG:32601", [179.98, -179.97], [49.9, 50.0])
    path = write_vectors(
        tmp_path / "a.gpkg", [shapely.box(min(xs), min(ys), max(xs), max(ys))], "EPSG:32601", kind=["roof"]
    )
    info = image_info(tmp_path / "image.tif", Affine(0.001, 0, 179.95, 0, -0.001, 50.0), SHAPE, "EPSG:4326")
    with pytest.raises(RasterError, match=r"feature 1 passes 180 degrees, where EPSG:4326 of .*ogr2ogr"):
        reading().open_labels(path, info)


@pytest.mark.parametrize("grid", [(1, 1), (3, 5)])
def test_by_tiles_as_whole(tmp_path: Path, info: Any, grid: tuple[int, int]) -> None:
    """Edges on pixel centres too, where the last digit decides; the whole is rasterio's, in one piece."""
    corners = [(350000 + 5.25 * i, 3770000 - 4.25 * i) for i in range(28)]
    on_centres = [shapely.MultiPolygon([shapely.box(x, y - 10, x + 20.5, y + 0.5)]) for x, y in corners]
    slanted = [
        shapely.MultiPolygon([shapely.Polygon([(x, y), (x + 30, y - 30), (x + 7.5, y - 40)])]) for x, y in corners
    ]
    shapes = [*drawn_shapes(5), *on_centres, *slanted]
    words = np.random.default_rng(2).choice(["lawn", "street", "roof"], len(shapes)).tolist()
    path = write_vectors(tmp_path / "roads.gpkg", shapes, UTM, kind=words)
    burnt = zip(shapes, (WORDS[word] for word in words), strict=True)
    whole = rasterio.features.rasterize(burnt, SHAPE, fill=255, transform=PLACE, dtype="uint8")
    found = np.empty(SHAPE, np.uint8)
    rows, cols = (np.linspace(0, size, parts + 1).astype(int) for size, parts in zip(SHAPE, grid, strict=True))
    with reading(background="ignored").open_labels(path, info) as labels:
        for top, bottom in pairwise(rows):
            for left, right in pairwise(cols):
                box = Box(Interval(int(top), int(bottom)), Interval(int(left), int(right)))
                found[box.slices] = read_labels(labels, reading().label_map, box)
    np.testing.assert_array_equal(found, whole)


def test_a_layer_is_named(tmp_path: Path, info: Any) -> None:
    import pyogrio.raw

    shapes = drawn_shapes(8, 4)
    path = write_vectors(tmp_path / "two.gpkg", shapes, UTM, kind=["lawn"] * 4)
    wkb, kinds = np.array([shapely.to_wkb(shapes[0])], object), [np.array(["roof"], object)]
    pyogrio.raw.write(
        path, wkb, kinds, ["kind"], crs=UTM, geometry_type="MultiPolygon", driver="GPKG", layer="b", append=True
    )
    with pytest.raises(RasterError, match=r"has 2 layers \(two, b\)"):
        reading().open_labels(path, info)
    with pytest.raises(RasterError, match=r"label_layer is c, but .*two, b"):
        reading(layer="c").open_labels(path, info)
    with reading(layer="b").open_labels(path, info) as labels:
        found = read_labels(labels, reading().label_map, Box.of_shape(SHAPE))
    np.testing.assert_array_equal(found, expected(shapes[:1], [2], 0, info))


def test_what_is_refused(tmp_path: Path, info: Any) -> None:
    """In one line that names the file and what is wrong."""
    shape = shapely.box(350010, 3769900, 350050, 3769990)
    good = write_vectors(tmp_path / "good.gpkg", [shape], UTM, kind=["lawn"])
    line = write_vectors(tmp_path / "line.gpkg", [shapely.LineString([(0, 0), (1, 1)])], UTM, kind=["lawn"])
    nowhere = write_vectors(tmp_path / "nowhere.gpkg", [shape], None, kind=["lawn"])
    odd = write_vectors(tmp_path / "odd.gpkg", [shape], UTM, kind=["swamp"])
    vrt = tmp_path / "vrt.gpkg"
    vrt.write_text("<OGRVRTDataSource><OGRVRTLayer name='a'/></OGRVRTDataSource>")
    damaged = tmp_path / "damaged.gpkg"
    damaged.write_bytes(Path(good).read_bytes()[:5000])
    plain = image_info(tmp_path / "photo.png", Affine.identity(), SHAPE, UTM)
    cases: list[tuple[PairReading, str, Any, tuple[str, ...]]] = [
        (reading(), odd, info, ("odd.gpkg, feature", "kind 'swamp'", "ground, road, roof")),
        (reading("sort"), good, info, ("label_attribute is sort", "kind")),
        (reading(None), good, info, ("label_attribute is null", "2 classes")),
        (reading(background=None), good, info, ("data.background is null", "ground, road, roof, or ignored")),
        (reading(background="sea"), good, info, ("data.background is sea", "ground")),
        (reading(), nowhere, info, ("nowhere.gpkg has no CRS",)),
        (reading(), good, plain, ("photo.png has no CRS",)),
        (reading(), str(vrt), info, ("vrt.gpkg is not the format of its ending",)),
        (reading(), str(damaged), info, ("damaged.gpkg",)),
        (reading(), str(tmp_path / "none.gpkg"), info, ("none.gpkg", "No such file")),
    ]
    for how, path, image, words in cases:
        with refusal(InputError, *words):
            how.open_labels(path, image)
    far = image_info(tmp_path / "image.tif", Affine(0.5, 0, 0, 0, -0.5, 100), SHAPE, UTM)
    with pytest.raises(RasterError, match=r"line.gpkg, feature 1 is a LineString"):
        reading().open_labels(line, far)
    with pytest.raises(ConfigError, match=r"data.label_attribute is given, but no labels are polygons"):
        reading(background=None).check_used(["labels.tif"])


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
