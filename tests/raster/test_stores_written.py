"""Outputs and Zarr stores: none goes into an input's store, a killed cut leaves nothing for ever, errors name what was
typed, and stores that `tiledseg tile` has cut are read by any of their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray

from tests.array_scenes import scene, write
from tests.small_files import write_raster
from tiledseg import evaluate, tile
from tiledseg.errors import OutputError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import takes_arrays
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import open_raster
from tiledseg.system.outputs import check_outputs, unfinished, whole


@pytest.fixture
def store(tmp_path: Path) -> str:
    return write(tmp_path, "zarr3", scene((3, 40, 40))).partition(":/")[0]


def test_nothing_is_written_into_a_store(store: str, tmp_path: Path) -> None:
    """Not as a chunk, as a member, or through a link; of a run neither."""
    (tmp_path / "link").symlink_to(store)
    before = sorted(Path(store).rglob("*"))
    for path in (f"{store}/map.tif", f"{store}/reflectance/c/map.tif", f"{tmp_path}/link/tiles.h5"):
        Path(path).parent.mkdir(exist_ok=True)
        with pytest.raises(OutputError, match="lies in the Zarr store"):
            check_outputs([whole("--output", path)])
    for end in ("tiles.h5", "tiles.zarr"):
        form = "hdf5" if end.endswith("h5") else "zarr"
        words = ["--images", f"{store}:/reflectance", "--grid", "2", "--output", f"{store}/{end}", "--format", form]
        assert tile.main(words) == 2
    assert sorted(Path(store).rglob("*")) == before


def test_an_array_s_own_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "scene.nc"
    xarray.DataArray(scene((2, 8, 8)), dims=("band", "y", "x"), name="a").to_netcdf(file, engine="h5netcdf")
    with xarray.open_dataarray(file) as array:
        opened = takes_arrays(lambda name: open_raster(name).info)(array)
    assert opened.files == (str(file),)


def test_a_killed_cut_s_store_goes_with_the_next(tmp_path: Path) -> None:
    image = write(tmp_path, "tif", scene((3, 64, 64)), "image")
    (tmp_path / ".cut.zarr.part" / "whole").mkdir(parents=True)
    words = ["--images", image, "--grid", "2", "--format", "zarr", "--output", str(tmp_path / "cut.zarr")]
    with unfinished(tmp_path / "cut.zarr"):
        assert tile.main(words) == 2
    assert tile.main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.zarr", Path(image).name]


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
    "--output t.zarr/": "--output is 't.zarr/'",
    "--output t.h5 --format zarr": "--output is 't.h5'",
    "--output= --format zarr": "--output is ''",
    "--output s3://bucket/tiles.zarr --format zarr": "--output is s3://bucket/tiles.zarr, but stores are written",
}


@pytest.mark.parametrize("words", LINES)
def test_errors_name_what_was_typed(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line each, and nothing is left."""
    monkeypatch.chdir(tmp_path)
    place = {"crs": "EPSG:32633", "transform": (10, 0, 600_000, 0, -10, 5_100_000)}
    write_raster(Path("image.tif"), np.ones((1, 8, 8), np.uint8), **place)
    write_raster(Path("labels.tif"), np.ones((1, 8, 8), np.uint8), **place)
    write_raster(Path("two.tif"), np.ones((2, 8, 8), np.uint8), **place)
    write_raster(Path("no.tif"), np.zeros((1, 8, 8), np.uint8), **place)
    write_raster(Path("odd.tif"), np.ones((1, 8, 8), np.uint8), crs=None, transform=None)
    Path("bad.zarr").mkdir()
    Path("bad.zarr", "zarr.json").write_text("[1]")
    given = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "1", "--output", "out.zarr"]
    given[-1] = "out.zarr" if "format zarr" in words else "out.h5"
    before = sorted(tmp_path.iterdir())
    assert tile.main([*given, *words.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert LINES[words] in line
    assert "data." not in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def cut(tmp_path: Path) -> str:
    """A store of one image of three bands and its labels, both with nodata 0."""
    image = write(tmp_path, "tif", scene((3, 64, 64)) % 7, "image", 0)
    labels = write(tmp_path, "tif", (scene((64, 64)) % 3).astype("uint8"), "labels", 0)
    store = str(tmp_path / "cut.zarr")
    words = ["--images", image, "--labels", labels, "--grid", "2", "--format", "zarr", "--output", store]
    assert tile.main(words) == 0
    return store


def test_a_variable_of_a_cut_store_has_its_mask(cut: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(cut).parent
    for kind, file in (("images", "image"), ("labels", "labels")):
        with open_raster(f"{cut}:/0/{kind}") as found, open_raster(folder / f"{file}-tif.tif") as expected:
            (pixels, valid), (own, own_valid) = (one.read(Box.of_shape((64, 64))) for one in (found, expected))
        np.testing.assert_array_equal(pixels, own)
        np.testing.assert_array_equal(valid, own_valid)
        assert not valid.all()
    printed = []
    for labels in (str(folder / "labels-tif.tif"), f"{cut}:/0/labels"):
        assert evaluate.main(["--prediction", str(folder / "labels-tif.tif"), "--labels", labels]) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1]
    with pytest.raises(RasterError, match="is a tile store; name one of its rasters, such as"):
        open_raster(cut)


def test_stores_are_paired_as_rasters_are(cut: str, tmp_path: Path) -> None:
    """They are folders, but not of rasters."""
    keys, names = ("data.images", "data.labels"), (f"{cut}:/0/images", f"{cut}:/0/labels")
    assert pair_sources([cut], [cut], keys) == ((names[0],), (names[1],))
    assert pair_sources([str(tmp_path / "c*.zarr")], [], keys) == ((names[0],), (names[1],))
    image, labels = (write(tmp_path, "zarr3", scene((64, 64)), name).partition(":/")[0] for name in ("one", "two"))
    assert pair_sources([image], [labels], keys) == ((image,), (labels,))
    (masked,) = expand_sources([image], "x", rules=SourceRules(valid=labels))
    with open_raster(masked) as reader:
        assert not reader.read(Box.of_shape((64, 64)))[1].all()


@pytest.mark.parametrize(("form", "labels"), [("hdf5", "cut.h5#0:labels"), ("zarr", "cut.zarr:/0/labels")])
def test_labels_of_colours_keep_their_bands(form: str, labels: str, tmp_path: Path) -> None:
    image, colours = scene((3, 64, 64)), (scene((3, 64, 64)) % 7).astype("uint8")
    words = ["--images", write(tmp_path, "tif", image, "image"), "--labels", write(tmp_path, "tif", colours, "labels")]
    store = str(tmp_path / labels.split("#")[0].split(":")[0])
    assert tile.main([*words, "--grid", "2", "--format", form, "--output", store]) == 0
    with open_raster(str(tmp_path / labels)) as found:
        np.testing.assert_array_equal(found.read(Box.of_shape((64, 64)))[0], colours)
