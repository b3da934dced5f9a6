"""Outputs and Zarr stores: none goes into an input's store, a killed cut leaves nothing for ever, and errors name what
was typed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray

from tests.array_scenes import scene, write
from tests.small_files import write_raster
from tiledseg import tile
from tiledseg.errors import OutputError, WriteError
from tiledseg.raster.array_names import takes_arrays
from tiledseg.raster.reader import open_raster
from tiledseg.raster.zarr_writer import store_made
from tiledseg.system.outputs import check_outputs, whole


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
