"""Tile stores: the arrays of their rasters in both formats, whole or not there, and damage in one line."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import rasterio

from tests.array_scenes import scene
from tests.array_scenes import write as write_scene
from tests.small_files import alike_in_bytes, write_raster
from tiledseg import evaluate, tile
from tiledseg.errors import OutputError, RasterError, WriteError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import mirrored_reader, tile_store
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import open_raster
from tiledseg.raster.tile_store import store_made
from tiledseg.system.outputs import check_outputs, whole

FORMS = {"hdf5": "tiles.h5", "zarr": "tiles.zarr"}
KEYS = "data.images", "data.labels"
SOURCES = ("image0", "image1"), ("labels0", "labels1")


@pytest.fixture
def rasters(tmp_path: Path) -> list[str]:
    """The flags of two images, one with a nodata corner and one without a place, and of their labels: numbers with a
    palette and names, and colours."""
    generator = np.random.default_rng(0)
    for number, (shape, place) in enumerate((((150, 170), {}), ((70, 90), {"crs": None, "transform": None}))):
        image_CHW = generator.integers(1, 60000, (3, *shape)).astype(np.uint16)
        image_CHW[:, :40, :30] = number
        write_raster(tmp_path / f"image{number}.tif", image_CHW, nodata=0, photometric="minisblack", **place)
        label_CHW = generator.integers(0, 4, (1 + 2 * number, *shape)).astype(np.uint8)
        write_raster(tmp_path / f"labels{number}.tif", label_CHW, nodata=3 if number == 0 else None, **place)
    with rasterio.open(tmp_path / "labels0.tif", "r+") as file:
        file.update_tags(1, CLASS_0="grün", CLASS_1="road")
        file.write_colormap(1, {0: (1, 2, 3, 255), 1: (4, 5, 6, 255)})
    paths = [[f"{tmp_path}/{name}.tif" for name in names] for names in SOURCES]
    return ["--images", *paths[0], "--labels", *paths[1]]


def cut(folder: Path, rasters: list[str], form: str = "hdf5", name: str = "") -> str:
    """Cut a store by the command; return its path."""
    store = str(folder / (name or FORMS[form]))
    assert tile.main([*rasters, "--grid", "3", "2", "--format", form, "--output", store]) == 0
    return store


def names_of(store: str) -> list[str]:
    return [f"{store}:/{number}/{kind}" for kind in ("images", "labels") for number in range(2)]


@pytest.mark.parametrize("form", FORMS)
def test_a_store_is_its_rasters(tmp_path: Path, rasters: list[str], form: str) -> None:
    """Any box, with its validity, place, palette and classes."""
    store = cut(tmp_path, rasters, form)
    generator = np.random.default_rng(5)
    for name, source in zip(names_of(store), (*SOURCES[0], *SOURCES[1]), strict=True):
        with open_raster(tmp_path / f"{source}.tif") as ours, open_raster(name) as theirs:
            for key in ("shape", "bands", "dtype", "crs", "palette", "class_names", "has_mask"):
                assert getattr(ours.info, key) == getattr(theirs.info, key), key
            assert (theirs.info.transform or rasterio.Affine.identity()) == ours.info.transform
            for _ in range(12):
                rows, cols = (sorted(generator.integers(-300, 300, 2)) for _ in range(2))
                box = Box(Interval(rows[0], rows[1] + 1), Interval(cols[0], cols[1] + 1))
                for found, expected in zip(theirs.read(box), ours.read(box), strict=True):
                    np.testing.assert_array_equal(found, expected)
                    assert found.dtype == expected.dtype
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("form", FORMS)
def test_stores_are_paired_as_rasters_are(tmp_path: Path, rasters: list[str], form: str, capsys: Any) -> None:
    store = cut(tmp_path, rasters, form)
    names = names_of(store)
    pairs = tuple(names[:2]), tuple(names[2:])
    for images, labels in (([store], [store]), ([f"{tmp_path}/t*{Path(store).suffix}"], []), ([store], [])):
        assert pair_sources(images, labels, KEYS) == pairs
    assert pair_sources([store], rasters[4:], KEYS)[1] == tuple(rasters[4:])
    with pytest.raises(RasterError, match="is a tile store; name one of its rasters"):
        open_raster(store)
    with pytest.raises(RasterError, match=r"image0.tif names no labels, and data.labels is empty"):
        pair_sources(rasters[1:3], [], KEYS)
    capsys.readouterr()
    printed = []
    for path in (rasters[4], names[2]):
        assert evaluate.main(["--prediction", rasters[4], "--labels", path]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_a_store_that_is_no_tile_store_is_an_image_or_a_mask(tmp_path: Path) -> None:
    image, labels = (write_scene(tmp_path, "zarr3", scene((64, 64)), name).partition(":/")[0] for name in ("a", "b"))
    assert pair_sources([image], [labels], KEYS) == ((image,), (labels,))
    (masked,) = expand_sources([image], "x", rules=SourceRules(valid=labels))
    with open_raster(masked) as reader:
        assert not reader.read(Box.of_shape((64, 64)))[1].all()


@alike_in_bytes
def test_stopped_at_any_write_it_leaves_no_store_and_the_next_run_cuts_a_whole_one(
    tmp_path: Path, rasters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of HDF5 is once the last one, ended by the disk or by a signal."""
    words = [*rasters[:2], *rasters[3:5], "--grid", "1", "--output"]
    assert tile.main([*words, str(tmp_path / "whole.h5")]) == 0
    expected = hashlib.sha256((tmp_path / "whole.h5").read_bytes()).hexdigest()
    path, write, left = tmp_path / "tiles.h5", os.write, [0]
    (tmp_path / ".tiles.h5.part").write_bytes(b"of a job that was killed")

    class KilledError(BaseException):
        pass

    killer: list[BaseException] = []

    def dying(handle: int, data: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise killer[-1]
        return write(handle, data)

    monkeypatch.setattr(tile_store.os, "write", dying)
    for each in (KilledError(), OSError(28, "No space left on device")):
        killer.append(each)
        deaths = 0
        while not path.exists():
            deaths += 5
            left[0] = deaths
            with contextlib.suppress(KilledError, WriteError):
                tile.main([*words, str(path)])
            assert not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() == expected
        assert deaths > 5
        path.unlink()


def test_a_killed_cut_s_store_goes_with_the_next(tmp_path: Path) -> None:
    """It has one hidden name, which a living job holds."""
    target = str(tmp_path / "tiles.zarr")
    part = tmp_path / ".tiles.zarr.part.packed"
    part.mkdir()
    (part / "zarr.json").touch()
    part.with_name(".tiles.zarr.part").touch()
    with pytest.raises(WriteError), store_made(target) as again:  # noqa: PT012
        assert (again, again.exists()) == (part, False)
        again.mkdir()
        again.mkdir()
    assert not list(tmp_path.iterdir())
    with store_made(target) as again:
        with pytest.raises(OutputError, match="another job is writing it too"), store_made(target):
            pass
        again.mkdir()
        (again / "0").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["tiles.zarr", "0"]


def test_unfinished_and_older_stores_are_refused(tmp_path: Path, rasters: list[str]) -> None:
    store = cut(tmp_path, rasters)
    with h5py.File(store, "r+") as file:
        del file.attrs["done"]
    with h5py.File(tmp_path / "three.h5", "w") as file:
        file.attrs.update(format="tiledseg tiles", version=3, done=True)
    (tmp_path / "two.h5").write_bytes(b"tiledseg tiles 2 000000001234")
    for name, words in (("tiles.h5", "is unfinished"), ("three.h5", "older version"), ("two.h5", "older version")):
        for path in (f"{tmp_path}/{name}", f"{tmp_path}/{name}:/0/images"):
            with pytest.raises(RasterError, match=rf"{name} is .*{words}|{words}; remove"):
                open_raster(expand_sources([path], "x")[0])


@pytest.mark.timeout(200)
def test_a_flipped_bit_is_found_or_without_effect(
    tmp_path: Path, rasters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_reader, "PAUSES", ())

    def everything(store: str) -> list[Any]:
        content: list[Any] = []
        for path in (*pair_sources([store], [], KEYS)[0], *pair_sources([store], [], KEYS)[1]):
            with open_raster(path) as reader:
                info = reader.info
                content += [info.shape, info.dtype, info.transform, info.crs, info.palette, info.class_names]
                content += reader.read(Box.of_shape(info.shape))
        return content

    store = cut(tmp_path, [*rasters[:2], *rasters[3:5]])
    expected, data = everything(store), Path(store).read_bytes()
    generator = np.random.default_rng(4)
    texts = [data.index(b"500000"), data.index(b"[[0, [1, ") + 6]  # of the CRS and of the palette, in no chunk
    others = generator.integers(0, len(data), 30).tolist()
    places = [*texts, *range(0, 48, 2), *others, *range(len(data) - 8, len(data))]
    refused = 0
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 1 if at in texts else 1 << int(generator.integers(8))
        Path(store).unlink()  # HDF5 keeps an open file's content
        Path(store).write_bytes(damaged)
        found: list[Any] | str
        try:
            found = everything(store)
        except RasterError as error:
            found = str(error)
            refused += 1
        if isinstance(found, str):
            assert "tiles.h5" in found
            assert "\n" not in found
            continue
        pairs = zip(found, expected, strict=True)
        assert all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs), f"byte {at}"
    assert refused > len(places) / 2


@pytest.mark.parametrize("name", ["tiles.h5", "tiles.zarr"])
def test_nothing_is_written_into_a_store(tmp_path: Path, name: str) -> None:
    """Not as a chunk, as a member, or through a link."""
    image = write_scene(tmp_path, "zarr3", scene((3, 40, 40)))
    store = Path(image.partition(":/")[0])
    (tmp_path / "link").symlink_to(store)
    before = sorted(store.rglob("*"))
    form = "zarr" if name.endswith("zarr") else "hdf5"
    for folder in (store, store / "reflectance" / "c", tmp_path / "link"):
        words = ["--images", image, "--grid", "2", "--format", form, "--output", str(folder / name)]
        assert tile.main(words) == 2
    with pytest.raises(OutputError, match="lies in the Zarr store"):
        check_outputs([whole("--output", store / "map.tif")])
    assert sorted(store.rglob("*")) == before


LINES = {
    "--bands [9]": "--bands asks for band 9",
    "--bands [1,1]": "--bands is [1, 1]",
    "--nodata 300": "--nodata is 300",
    "--valid 9": "--valid asks for band 9, but image.tif has bands 1 to 1",
    "--images bad.zarr": "cannot open bad.zarr: ",
    "--valid none.tif": "which --valid asks for",
    "--valid two.tif": "--valid is two.tif with 2 bands",
    "--valid odd.tif": "odd.tif has no CRS or transform, which --valid needs",
    "--valid no.tif": "no valid pixel in any image: all are nodata, masked or NaN; check --nodata, --v",
    "--valid no.tif --format zarr": "no valid pixel in any image: all are nodata, masked or NaN; check --nodata, --v",
    "--assets [red]": "--assets is ['red'], but no image is a STAC item",
    "--background tree": "--background is given, but no labels are polygons",
    "--output t.zarr": "--output is 't.zarr'",
    "--output t.h5 --format zarr": "--output is 't.h5'",
    "--output s3://bucket/tiles.zarr --format zarr": "--output is s3://bucket/tiles.zarr, but stores are written",
}


@pytest.mark.parametrize("words", LINES)
def test_errors_name_what_was_typed(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line each, and nothing is left."""
    monkeypatch.chdir(tmp_path)
    place = {"crs": "EPSG:32633", "transform": (10, 0, 600_000, 0, -10, 5_100_000)}
    for name, bands, value in (("image", 1, 1), ("labels", 1, 1), ("two", 2, 1), ("no", 1, 0)):
        write_raster(Path(f"{name}.tif"), np.full((bands, 8, 8), value, np.uint8), **place)
    write_raster(Path("odd.tif"), np.ones((1, 8, 8), np.uint8), crs=None, transform=None)
    Path("bad.zarr").mkdir()
    Path("bad.zarr", "zarr.json").write_text("[1]")
    output = "out.zarr" if "format zarr" in words else "out.h5"
    given = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "1", "--output", output]
    before = sorted(tmp_path.iterdir())
    assert tile.main([*given, *words.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert LINES[words] in line
    assert "data." not in line
    assert sorted(tmp_path.iterdir()) == before
