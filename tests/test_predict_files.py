"""The files that predict writes: formats, polygons."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from numpy.typing import NDArray
from rasterio.features import geometry_mask, shapes
from rasterio.windows import Window

from tests.crash.runs import Material
from tests.raster.referring import category_names
from tests.small_files import PLACE, UTM, read_raster, write_raster
from tiledseg.errors import RasterError, install
from tiledseg.geometry.box import Box
from tiledseg.inference import mapping, trained
from tiledseg.predict import main
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.train import main as train

SHAPE = (61, 83)
CLASSES = {"water": (0, 0, 255), "wood & field": (0, 170, 16), "roof": (255, 0, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained network, and an image with a corner without data."""
    root = tmp_path_factory.mktemp("files")
    material = Material.make(root)
    classes = f"--data.classes={json.dumps([{'name': name, 'colour': colour} for name, colour in CLASSES.items()])}"
    assert train([*material.train_command(root / "run")[1:], "--train.epochs", "1", classes]) == 0
    pixels_CHW = np.random.default_rng(2).integers(1, 256, (3, *SHAPE), np.uint8)
    pixels_CHW[:, :9, :13] = 0
    write_raster(root / "image.tif", pixels_CHW, nodata=0)
    return root


def predict(folder: Path, output: Path, *options: str) -> int:
    files = ["--checkpoint", str(folder / "run"), "--image", str(folder / "image.tif"), "--output", str(output)]
    return main([*files, "--tiling.grid", "3", "--verbosity", "0", *options])


@pytest.fixture(scope="module")
def plain(folder: Path) -> NDArray[np.uint8]:
    """The classes of the map that is kept as the ranks have written it."""
    assert predict(folder, folder / "plain.tif", "--format", "gtiff") == 0
    return read_raster(folder / "plain.tif")[0]


def test_a_format_changes_no_pixel(folder: Path, plain: NDArray[np.uint8], tmp_path: Path) -> None:
    shares, options = tmp_path / "p.tif", ["--compress", "zstd"]
    assert predict(folder, tmp_path / "map.tif", *options, "--probabilities", str(shares)) == 0
    with rasterio.open(tmp_path / "map.tif") as made, rasterio.open(shares) as probabilities:
        np.testing.assert_array_equal(made.read(1), plain)
        assert made.profile["compress"] == "zstd"
        assert probabilities.descriptions[2] == "probability of roof"
    assert category_names(tmp_path / "map.tif") == list(CLASSES)
    assert {p.name for p in tmp_path.iterdir()} == {"map.tif", "map.tif.aux.xml", "map.qml", "p.tif"}


def test_a_store_has_the_pixels_and_the_classes(
    folder: Path, plain: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Another name or a full disk is one line, and leaves nothing."""
    store, is_zarr = tmp_path / "map.zarr", ["--format", "zarr"]
    assert predict(folder, store, *is_zarr, "--compress", "deflate") == 0
    with open_raster(store) as reader:
        assert np.array_equal(reader.read(Box.of_shape(SHAPE))[0][0], plain)
        assert [name for _, name in reader.info.class_names] == list(CLASSES)
        assert reader.info.nodata == 255
    assert "warning" not in capsys.readouterr().err
    for output, options, words in (
        ("m.tif", is_zarr, "give a file name that ends in .zarr"),
        ("m.zarr", [], "give a file name that ends in .tif"),
        ("map.zarr", is_zarr, "is there; remove it"),
    ):
        assert predict(folder, tmp_path / output, *options) == 2
        assert words in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiledseg.inference.predictor.write_chunks", full)
    assert predict(folder, tmp_path / "m.zarr", *is_zarr) == 1
    assert "make room" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["map.zarr"]


def test_without_the_data_of_proj_a_lost_code_is_said_first(tmp_path: Path) -> None:
    """In a process of its own: PROJ looks for them once."""
    code = (
        "from affine import Affine; from tiledseg.raster.info import RasterInfo, code_notes; "
        "print(code_notes([RasterInfo('image.tif', 1, 1, 1, 'uint8', transform=Affine(2, 0, 0, 0, 2, 0))]))"
    )
    environ = {**os.environ, "PROJ_DATA": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    for line in (f"unset PROJ_DATA ({tmp_path})", "image.tif lose the EPSG code", "PROJ does not find its data"):
        assert line in ended.stdout


def test_an_image_that_is_written_to_while_it_is_mapped_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    image, read = tmp_path / "image.tif", Dataset.load
    image.write_bytes((folder / "image.tif").read_bytes())
    words = ["--image", str(image), "--verbosity", "1"]
    assert predict(folder, tmp_path / "left alone.tif", *words) == 0
    assert "warning" not in capfd.readouterr().err

    def read_then_write(dataset: Dataset, *arguments: Any) -> Any:
        sample = read(dataset, *arguments)
        with rasterio.open(image, "r+") as file:
            file.write(np.full((1, 1), 7, np.uint8), 1, window=Window(3, 50, 1, 1))
        return sample

    monkeypatch.setattr(Dataset, "load", read_then_write)
    assert predict(folder, tmp_path / "map.tif", *words) == 0
    said = capfd.readouterr().err
    assert said.count(f"warning: {image} was written to while it was mapped") == 1, said


def read_polygons(path: Path) -> tuple[dict, NDArray, NDArray, NDArray, NDArray]:
    meta, _, wkb, (numbers, names, pixels) = pyogrio.raw.read(path, layer="classes")
    return meta, shapely.from_wkb(wkb), numbers, names, pixels


def test_polygons_are_those_of_the_whole_map(folder: Path, plain: NDArray[np.uint8], tmp_path: Path) -> None:
    """As rasterio outlines the written map, on the ground. Then some classes, by name or number; the older file goes,
    and the map has all."""
    gpkg = tmp_path / "classes.gpkg"
    outlined = shapes(plain, plain != 255, connectivity=4, transform=PLACE)
    whole = [(int(n), shapely.normalize(shapely.geometry.shape(s)).wkb) for s, n in outlined]
    for options, numbers in (([], {0, 1, 2}), (["--polygons-classes", "0,roof"], {0, 2})):
        assert predict(folder, tmp_path / "map.tif", "--polygons", str(gpkg), *options) == 0
        meta, found, of_class, names, sizes = read_polygons(gpkg)
        pairs = zip(of_class, found, strict=True)
        wanted = sorted(pair for pair in whole if pair[0] in numbers)
        assert sorted((int(n), shapely.normalize(one).wkb) for n, one in pairs) == wanted
        assert len(found) > 50
        assert meta["crs"] == UTM
        assert [list(CLASSES)[n] for n in of_class] == list(names)
        np.testing.assert_allclose(shapely.area(found), sizes * 0.25)
        assert {p.name for p in tmp_path.iterdir()} == {"classes.gpkg", "map.tif", "map.tif.aux.xml", "map.qml"}
        assert (read_raster(tmp_path / "map.tif")[0] == plain).all()


def test_polygons_without_their_library(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyogrio", None)
    assert predict(folder, tmp_path / "map.tif", "--polygons", str(tmp_path / "a.gpkg")) == 2
    err = capfd.readouterr().err
    assert install("vector") in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_polygons(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpkg = tmp_path / "classes.gpkg"
    assert predict(folder, tmp_path / "m.tif", "--polygons", str(gpkg)) == 0
    old, names = gpkg.read_bytes(), {path.name for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("database or disk is full")

    monkeypatch.setattr(pyogrio.raw, "write", fail)
    assert predict(folder, tmp_path / "m.tif", "--polygons", str(gpkg)) == 1
    assert gpkg.read_bytes() == old
    assert {path.name for path in tmp_path.iterdir()} == names


def test_many_rasters_a_call_give_the_maps_of_as_many_calls(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a network that is loaded once; each image has its own size, and the first no place."""
    images, maps, shares, areas = (tmp_path / name for name in ("images", "maps", "shares", "areas"))
    for path in (images, maps, shares, areas):
        path.mkdir()
    for k in range(3):
        pixels_CHW = np.random.default_rng(k).integers(1, 256, (3, 40 + 9 * k, 50 - 7 * k), np.uint8)
        write_raster(images / f"i{k}.tif", pixels_CHW, **({} if k else {"crs": None, "transform": None}))
    built = []
    built_network = trained.load_trained
    monkeypatch.setattr("tiledseg.inference.trained.load_trained", lambda *a: built.append(1) or built_network(*a))
    files = ["--probabilities", str(shares), "--polygons", str(areas), "--verbosity", "1"]
    assert predict(folder, maps, "--image", str(images / "i1.tif"), str(images / "i[02].tif"), *files) == 0
    assert built == [1]
    assert capfd.readouterr().err.count("i0.tif, which has no transform, are in pixels (col, row)") == 1
    for k in range(3):
        alone = ["--probabilities", str(tmp_path / "p.tif"), "--polygons", str(tmp_path / "c.gpkg")]
        assert predict(folder, tmp_path / "m.tif", "--image", str(images / f"i{k}.tif"), *alone) == 0
        assert (maps / f"i{k}.tif").read_bytes() == (tmp_path / "m.tif").read_bytes()
        assert (shares / f"i{k}.tif").read_bytes() == (tmp_path / "p.tif").read_bytes()
        assert len(read_polygons(areas / f"i{k}.gpkg")[1]) == len(read_polygons(tmp_path / "c.gpkg")[1])
    (maps / "i0.tif").unlink()
    assert predict(folder, maps, "--image", f"{images}/i0.tif", "--output", f"{maps}/") == 0
    assert (maps / "i0.tif").exists(), "a name that ends in a slash is a folder"


def test_a_damaged_image_among_many_leaves_the_maps_before_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "maps").mkdir()
    for name in "abc":
        write_raster(tmp_path / f"{name}.tif", np.full((3, 40, 50), 9, np.uint8))
    opened = mapping.open_dataset

    def fail_at_b(share: mapping.ImageShare, *rest: object) -> object:
        if share.request.image.endswith("b.tif"):
            raise RasterError("b.tif is broken")
        return opened(share, *rest)

    monkeypatch.setattr(mapping, "open_dataset", fail_at_b)
    assert predict(folder, tmp_path / "maps", "--image", f"{tmp_path}/*.tif") == 2
    assert "b.tif is broken" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["a.qml", "a.tif", "a.tif.aux.xml"]


@pytest.mark.parametrize("mode", ["read", "layer"])
def test_an_area_only_is_the_map_within_it(
    folder: Path, plain: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Pixel for pixel, by their centres; tiles without such a pixel are not read, and have no data."""
    polygon = shapely.Polygon([(500003.2, 3759995.1), (500019.9, 3759997.7), (500009.4, 3759981.3)])
    where = np.array([shapely.to_wkb(polygon)], object)
    pyogrio.raw.write(tmp_path / "area.gpkg", where, [], [], geometry_type="Polygon", crs=UTM)
    loaded = []
    load = Dataset.load
    monkeypatch.setattr(Dataset, "load", lambda self, *a: loaded.append(a[1].index) or load(self, *a))
    files = ["--area", str(tmp_path / "area.gpkg"), "--probabilities", str(tmp_path / "p.tif")]
    options = [*files, "--tiling.grid", "[6,8]", "--parallel.halo", mode]
    assert predict(folder, tmp_path / "m.tif", *options) == 0
    inside_HW = geometry_mask([polygon], SHAPE, PLACE, invert=True)
    np.testing.assert_array_equal(read_raster(tmp_path / "m.tif")[0], np.where(inside_HW, plain, 255))
    np.testing.assert_array_equal(np.isnan(read_raster(tmp_path / "p.tif")[0]), ~inside_HW | (plain == 255))
    assert len(set(loaded)) < 24 if mode == "read" else len(loaded) == 1
