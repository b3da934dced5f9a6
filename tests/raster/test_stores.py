"""Zarr stores, netCDF files and DataArrays that are damaged, lead elsewhere, or are no rasters: one line each. Stores
that `tiledseg tile` has cut are read by any of their names; no output goes into an input's store."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import dask.array
import h5py
import numpy as np
import pytest
import xarray
import zarr

from tests.array_scenes import CHUNK, as_array, chunks, scene, write
from tests.raster.test_arrays import SHAPE, read
from tiledseg import evaluate, tile
from tiledseg.errors import InputError, OutputError, RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.array_names import takes_arrays
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import open_raster
from tiledseg.system.outputs import check_outputs, unfinished, whole


def link_outside(folder: Path) -> None:
    chunk = chunks(folder)[0]
    chunk.rename(folder / "elsewhere")
    chunk.symlink_to(folder / "elsewhere")


def fifo(folder: Path) -> None:
    chunks(folder)[0].unlink()
    os.mkfifo(chunks(folder)[0].parent / "0")


def codec(folder: Path) -> None:
    """A stranger's pickle as a chunk, which would write a file when it is decoded."""
    for file in folder.rglob("zarr.json"):
        words = json.loads(file.read_text())
        if words.get("codecs"):
            words["codecs"].append({"name": "numcodecs.pickle", "configuration": {}})
            file.write_text(json.dumps(words))


class Trap:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/tiledseg-was-here", "w"))


def codec2(folder: Path) -> None:
    file = folder / "reflectance-zarr2.zarr" / "x" / ".zarray"
    words = json.loads(file.read_text())
    file.write_text(json.dumps({**words, "compressor": {"id": "pickle"}}))
    (file.parent / "0").write_bytes(pickle.dumps(Trap()))
    (folder / "reflectance-zarr2.zarr" / ".zmetadata").unlink()


def uneven(folder: Path) -> None:
    x = zarr.open_array(str(folder / "reflectance-zarr3.zarr" / "x"), mode="r+")
    x[5] = x[5] + 7


def complex_pixels(folder: Path) -> None:
    store = zarr.open_group(str(folder / "reflectance-zarr2.zarr"), mode="r+", zarr_format=2)
    dims = {"_ARRAY_DIMENSIONS": ["y", "x"]}
    store.create_array("reflectance", data=np.ones(SHAPE[1:], "complex64"), attributes=dims, overwrite=True)
    zarr.consolidate_metadata(store.store, zarr_format=2)


def texts(folder: Path) -> None:
    store = zarr.open_group(str(folder / "reflectance-zarr3.zarr"), mode="r+", use_consolidated=False)
    store.create_array("reflectance", data=np.full(SHAPE[1:], "abc"), dimension_names=("y", "x"), overwrite=True)


@pytest.mark.parametrize(
    ("form", "damage", "words"),
    [
        ("zarr2", lambda folder: chunks(folder)[0].unlink(), "no chunk reflectance/0.0.0, whose pixels"),
        ("zarr3", lambda folder: chunks(folder)[0].unlink(), "no chunk reflectance/c/0/0/0, whose pixels"),
        ("zarr2", lambda folder: chunks(folder)[0].write_bytes(b"short"), "cannot read rows"),
        ("zarr3", lambda folder: chunks(folder)[0].write_bytes(b"short"), "cannot read rows"),
        ("zarr3", link_outside, "leads out of its store"),
        ("zarr3", fifo, "is a FIFO"),
        ("zarr3", codec, "has the codec 'pickle'"),
        ("zarr2", codec2, "has the codec 'pickle'"),
        ("zarr3", lambda folder: (folder / "reflectance-zarr3.zarr" / "zarr.json").write_text("{"), "cannot open"),
        ("zarr3", uneven, "uneven steps"),
        ("zarr2", complex_pixels, "complex64 pixels"),
        ("zarr3", texts, "holds .* pixels"),
        ("nc4", lambda folder: (folder / "reflectance-nc4.nc").write_bytes(b"\x89HDF\r\n\x1a\nxx"), "cannot open"),
        ("nc3", lambda folder: (folder / "reflectance-nc3.nc").write_bytes(b"CDF\x01xx"), "cannot open"),
    ],
)
def test_damage_and_ways_out_are_one_line(tmp_path: Path, form: str, damage: Any, words: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("tiledseg.raster.mirrored_reader.PAUSES", (0.0,))
    path = write(tmp_path, form, scene(SHAPE))
    damage(tmp_path)
    with pytest.raises(RasterError, match=words) as refusal:
        read(path)
    assert len(str(refusal.value).splitlines()) == 1
    assert not Path("/tmp/tiledseg-was-here").exists()


def test_a_missing_chunk_is_without_data_where_the_store_says_so(tmp_path: Path) -> None:
    for form, nodata in (("zarr2", 7), ("zarr3", 7)):
        array = as_array(scene(SHAPE, "int16"), nodata=nodata)
        path = tmp_path / f"{form}.zarr"
        zarr_format: Any = int(form[-1])
        encoding = {"chunks": (1, CHUNK, CHUNK)} | ({"fill_value": nodata} if zarr_format == 3 else {})
        array.to_dataset().to_zarr(
            path, zarr_format=zarr_format, encoding={"reflectance": encoding}, consolidated=False
        )
        next(
            file for file in sorted(path.glob("reflectance/**/*")) if file.name in ("0.0.0", "0")
        ).unlink() if zarr_format == 2 else shutil.rmtree(path / "reflectance/c/0/0")
        _, valid, _ = read(f"{path}:/reflectance")
        assert not valid[:CHUNK, :CHUNK].any()
        assert valid[CHUNK:].any()


def test_a_netcdf_file_that_names_others_is_refused(tmp_path: Path) -> None:
    inner = write(tmp_path, "nc4", scene(SHAPE), "inner").removesuffix(":/inner")
    path = write(tmp_path, "nc4", scene(SHAPE)).removesuffix(":/reflectance")
    for at, add in enumerate(
        (
            lambda file: file.__setitem__("away", h5py.ExternalLink(inner, "/inner")),
            lambda file: file.create_dataset("away", (4,), "i4", external=[(str(tmp_path / "raw"), 0, 16)]),
            lambda file: file.create_virtual_dataset("away", layout()),
        )
    ):

        def layout() -> Any:
            made = h5py.VirtualLayout(SHAPE, "u2")
            made[:] = h5py.VirtualSource(inner, "inner", SHAPE)
            return made

        copy = shutil.copy(path, tmp_path / f"{at}.nc")
        with h5py.File(copy, "r+") as file:
            add(file)
        with pytest.raises(RasterError, match="has away in another file"):
            read(f"{copy}:/reflectance")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (xarray.DataArray(np.zeros((2, 3, 4)), dims=("a", "b", "c")), "has the dims a, b, c, without rows and columns"),
        (as_array(scene((3, 20, 30))).expand_dims(depth=2), "has the dims depth 2, band 3 beside y and x"),
        (as_array(scene((20, 30))).assign_attrs(_FillValue=1, missing_value=[1, 2]), "states 1.0, 2.0 for pixels"),
        (as_array(scene((20, 30))).to_dataset(), "an xarray.Dataset is given; give a DataArray"),
        (
            as_array(scene((20, 30)))
            .chunk()
            .copy(data=dask.array.zeros((20, 30)).map_blocks(lambda one: one[1:], dtype="u2")),
            "other sizes",
        ),
        (as_array(scene((20, 30)) > 3), "holds bool pixels"),
        (as_array(scene((3, 0, 30))).chunk(), "has no pixel: "),
        (as_array(scene((20, 30))).assign_coords(spatial_ref=((), 0, {"crs_wkt": "/etc/passwd"})), "has the CRS"),
    ],
)
def test_arrays_that_are_no_rasters(array: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(array, Box(Interval(0, 20), Interval(0, 1)))


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
