"""The predict command, one rank: one map whatever the grid, on the image's own grid; formats and polygons."""

import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
import torch
from numpy.typing import NDArray
from rasterio.features import geometry_mask, shapes
from rasterio.windows import Window
from safetensors.torch import load_file

from tests.answers import errors_of, refuse
from tests.crash.runs import Material
from tests.raster.referring import category_names
from tests.small_files import PLACE, UTM, read_raster, write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.errors import OutputError, RasterError, install
from tiledseg.geometry.box import Box
from tiledseg.inference import mapping, predictor, trained
from tiledseg.models.network import build_modules
from tiledseg.predict import main
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.tile import main as tile
from tiledseg.train import main as train

SHAPE = (61, 83)
CLASSES = {"water": (0, 0, 255), "wood & field": (0, 170, 16), "roof": (255, 0, 0)}


@pytest.fixture(scope="module")
def folder(material: Material) -> Path:
    """A trained network, and an image with a corner without data, whose sides no alignment divides."""
    root = material.root
    classes = f"--data.classes={json.dumps([{'name': name, 'colour': colour} for name, colour in CLASSES.items()])}"
    assert train([*material.train_command(root / "run")[1:], "--train.epochs", "1", classes]) == 0
    pixels_CHW = np.random.default_rng(2).integers(1, 256, (3, *SHAPE), np.uint8)
    pixels_CHW[:, :9, :13] = 0
    write_raster(root / "image.tif", pixels_CHW, nodata=0)
    return root


def predict(folder: Path, output: Path, *options: str) -> int:
    files = ["--checkpoint", str(folder / "run"), "--image", str(folder / "image.tif"), "--output", str(output)]
    return main([*files, "--tiling.grid", "3", "--verbosity", "0", *options])


def network_of(run: Path) -> torch.nn.Module:
    """Return a run's network in float64."""
    checkpoint = find_checkpoint(str(run))
    network = build_modules(checkpoint.saved.network).double().eval()
    network.load_state_dict(load_file(checkpoint.path / "model.safetensors"))
    return network


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[bytes, NDArray, NDArray]:
    """The map of grid 1 x 1: its bytes, its classes, its probabilities."""
    output, probabilities = folder / "whole.tif", folder / "whole-probabilities.tif"
    assert predict(folder, output, "--tiling.grid", "1", "--probabilities", str(probabilities)) == 0
    return output.read_bytes(), read_raster(output)[0], read_raster(probabilities)


@pytest.mark.parametrize("grid", ["[31,42]", "auto"])
def test_the_map_does_not_depend_on_the_grid(
    folder: Path, whole: tuple[bytes, NDArray, NDArray], tmp_path: Path, grid: str
) -> None:
    """Byte for byte; 31 x 42 is the finest."""
    output, shares = tmp_path / "map.tif", tmp_path / "shares.tif"
    assert predict(folder, output, "--tiling.grid", grid, "--probabilities", str(shares)) == 0
    assert output.read_bytes() == whole[0]
    np.testing.assert_array_equal(read_raster(shares), whole[2])


def test_what_tiles_change_is_refused_or_told(material: Material, folder: Path, tmp_path: Path) -> None:
    """By the plan that training has: accepted with `parallel.exact false`, it is a warning here too. Pixels as they are
    have no normalisation of their own."""
    run, output = tmp_path / "run", tmp_path / "map.tif"
    options = ["--train.epochs", "1", "--model.norm", "instance", "--parallel.exact", "false"]
    assert train([*material.train_command(run)[1:], *options, "--data.normalize", "false"]) == 0
    cut = ["--checkpoint", str(run), "--tiling.grid", "2", "--verbosity", "1"]
    refuse(lambda: predict(folder, output, *cut), "model.norm is instance")
    assert not output.exists()
    cut += ["--parallel.exact", "false"]
    assert "warning: not exact: model.norm is instance" in errors_of(lambda: predict(folder, output, *cut))
    assert output.exists()
    words = "--normalize is image, but the network takes pixels as they are"
    refuse(lambda: predict(folder, tmp_path / "m.tif", *cut, "--normalize", "image"), words)
    assert sorted(path.name for path in tmp_path.glob("*.tif")) == ["map.tif"]


def test_fp64_is_the_trained_network_in_float64(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of its weights rounded to float32: logits were off by 1.6e-4. Input, weights, statistics and constants
    of the normalisation are taken as they are saved."""
    run, image = tmp_path / "run", material.root / "held-out.tif"
    options = "--train.epochs 1 --train.precision fp32 --model.norm batch --tiling.grid 1 --train.tiles_per_step 1"
    assert train([*material.train_command(run)[1:], *options.split()]) == 0
    found: list[torch.Tensor] = []
    original = mapping.shares_of
    monkeypatch.setattr(mapping, "shares_of", lambda scores: found.append(scores.clone()) or original(scores))
    files = ["--checkpoint", str(run), "--image", str(image), "--tiling.grid", "1"]
    files += ["--probabilities", str(tmp_path / "p.tif"), "--precision", "fp64"]
    assert predict(tmp_path, tmp_path / "m.tif", *files) == 0
    saved, network = find_checkpoint(str(run)).saved.normalization, network_of(run)
    pixels_CHW = read_raster(image).astype(np.float64)
    mean, std = (np.array(of)[:, None, None] for of in (saved.mean, saved.std))
    with torch.inference_mode():
        expected = network(torch.from_numpy((pixels_CHW - mean) / std)[None])[0]
    assert found[0].dtype == torch.float64
    assert (found[0] - expected).abs().max().item() < 1e-12


def test_a_raster_is_normalised_by_its_own_bands(folder: Path, tmp_path: Path) -> None:
    """By mean and deviation of its valid pixels, counted by numpy; pixels without data are 0."""
    image = tmp_path / "dark.tif"
    pixels_CHW = np.random.default_rng(3).integers(1, 90, (3, 44, 68), np.uint8)
    pixels_CHW[:, :9, :13] = 0
    write_raster(image, pixels_CHW, nodata=0)
    files = ["--image", str(image), "--probabilities", str(tmp_path / "p.tif"), "--precision", "fp64"]
    assert predict(folder, tmp_path / "m.tif", *files, "--normalize", "image") == 0
    valid_HW = (pixels_CHW > 0).all(0)
    mean, std = (of(pixels_CHW[:, valid_HW].astype(np.float64), 1)[:, None, None] for of in (np.mean, np.std))
    x_CHW = np.where(valid_HW, (pixels_CHW - mean) / std, 0)
    with torch.inference_mode():
        expected = network_of(folder / "run")(torch.from_numpy(x_CHW)[None])[0].softmax(0).numpy()
    found = read_raster(tmp_path / "p.tif")
    assert np.abs(found - expected)[:, valid_HW].max() < 1e-6
    assert np.isnan(found[:, ~valid_HW]).all()


def test_the_map_of_a_tile_store_is_that_of_its_image(
    folder: Path, whole: tuple[bytes, NDArray, NDArray], tmp_path: Path
) -> None:
    store, output = tmp_path / "tiles.h5", tmp_path / "map.tif"
    cut = ["--grid", "2", "--levels", "2", "--convs-per-level", "1", "--output", str(store)]
    assert tile(["--images", str(folder / "image.tif"), *cut]) == 0
    assert predict(folder, output, "--image", str(store), "--tiling.grid", "auto") == 0
    with rasterio.open(output) as file:
        np.testing.assert_array_equal(file.read(1), whole[1])
        assert (file.crs.to_string(), file.transform) == (UTM, PLACE)


def test_the_map_lies_on_the_image_and_probabilities_agree_with_it(
    folder: Path, whole: tuple[bytes, NDArray, NDArray]
) -> None:
    _, classes_HW, shares_KHW = whole
    with rasterio.open(folder / "whole.tif") as made, rasterio.open(folder / "image.tif") as source:
        assert (made.crs, made.transform, made.shape) == (source.crs, source.transform, source.shape)
        assert (made.count, made.dtypes, made.nodata) == (1, ("uint8",), 255)
        np.testing.assert_array_equal(classes_HW == 255, source.dataset_mask() == 0)
    assert set(np.unique(classes_HW)) <= {0, 1, 2, 255}
    assert (shares_KHW.shape, shares_KHW.dtype) == ((3, *SHAPE), np.float32)
    valid_HW = classes_HW != 255
    assert np.isnan(shares_KHW[:, ~valid_HW]).all()
    np.testing.assert_allclose(shares_KHW[:, valid_HW].sum(0), 1, rtol=1e-6)
    np.testing.assert_array_equal(shares_KHW[:, valid_HW].argmax(0), classes_HW[valid_HW])


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (mapping, "shares_of", OutputError("the disk is full; make room")),
        (predictor, "publish", OutputError("the disk is full; make room")),
        (pyogrio.raw, "write", RuntimeError("database or disk is full")),
    ],
)
def test_a_failure_leaves_the_old_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, what: str, error: Exception
) -> None:
    options = "--polygons", str(tmp_path / "a.gpkg"), "--probabilities", str(tmp_path / "shares.tif")
    assert predict(folder, tmp_path / "map.tif", *options) == 0
    (tmp_path / "map.tif").write_bytes(b"old")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, what, fail)
    refuse(lambda: predict(folder, tmp_path / "map.tif", *options), "disk is full", code=1 if what == "write" else 2)
    assert {path: path.read_bytes() for path in before} == before
    assert what == "publish" or {*tmp_path.iterdir()} == {*before}


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
    folder: Path, plain: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is there or a full disk is one line, and leaves nothing."""
    store, is_zarr = tmp_path / "map.zarr", ["--format", "zarr"]
    assert errors_of(lambda: predict(folder, store, *is_zarr, "--compress", "deflate")) == ""
    with open_raster(store) as reader:
        assert np.array_equal(reader.read(Box.of_shape(SHAPE))[0][0], plain)
        assert [name for _, name in reader.info.class_names] == list(CLASSES)
        assert reader.info.nodata == 255
    refuse(lambda: predict(folder, store, *is_zarr), "is there; remove it")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tiledseg.inference.predictor.write_chunks", full)
    refuse(lambda: predict(folder, tmp_path / "m.zarr", *is_zarr), "make room", code=1)
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
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, read = tmp_path / "image.tif", Dataset.load
    image.write_bytes((folder / "image.tif").read_bytes())
    words = ["--image", str(image), "--verbosity", "1"]
    assert "warning" not in errors_of(lambda: predict(folder, tmp_path / "left alone.tif", *words))

    def read_then_write(dataset: Dataset, *arguments: Any) -> Any:
        sample = read(dataset, *arguments)
        with rasterio.open(image, "r+") as file:
            file.write(np.full((1, 1), 7, np.uint8), 1, window=Window(3, 50, 1, 1))
        return sample

    monkeypatch.setattr(Dataset, "load", read_then_write)
    said = errors_of(lambda: predict(folder, tmp_path / "map.tif", *words))
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


def test_polygons_without_their_library(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyogrio", None)
    ask = partial(predict, folder, tmp_path / "m.tif", "--polygons", str(tmp_path / "a.gpkg"))
    refuse(ask, install("vector"))
    monkeypatch.delitem(sys.modules, "pyogrio")
    (tmp_path / "pyogrio.py").write_text("raise ImportError('libgdal.so.37: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    refuse(ask, "--polygons needs pyogrio, which cannot be imported: libgdal.so.37: cannot open")
    assert {path.name for path in tmp_path.iterdir()} <= {"pyogrio.py", "__pycache__"}


def test_many_rasters_a_call_give_the_maps_of_as_many_calls(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    files = ["--image", str(images / "i1.tif"), str(images / "i[02].tif"), *files]
    said = errors_of(lambda: predict(folder, maps, *files))
    assert said.count("i0.tif, which has no transform, are in pixels (col, row)") == 1
    assert built == [1]
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
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    refuse(lambda: predict(folder, tmp_path / "maps", "--image", f"{tmp_path}/*.tif"), "b.tif is broken")
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
