"""Zarr stores, netCDF files and DataArrays as rasters: the pixels and the place of the GeoTIFF of the same scene."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray
import zarr
from affine import Affine
from zarr.storage import LocalStore

from tests.array_scenes import CHUNK, CRS, FORMS, STORES, TRANSFORM, as_array, scene, write
from tests.raster import range_server
from tests.raster.range_server import running
from tiledseg.errors import RasterError
from tiledseg.foreign.tile_dataset import TileDataset
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import array_names
from tiledseg.raster.array_names import ArrayName, parse_array_name, takes_arrays
from tiledseg.raster.composed import BANDS, Composed
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.reader import identify, open_raster, written_since

SHAPE = (3, 101, 120)
WHOLE = Box.of_shape(SHAPE[1:])


@takes_arrays
def read(path: Any, box: Box = WHOLE, **how: Any) -> tuple[Any, Any, Any]:
    with open_raster(path, **how) as reader:
        return (*reader.read(box), reader.info)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "nodata"), [("int16", 7), ("float32", None), ("float64", 3)])
def test_a_scene_has_its_pixels_and_its_place_in_every_form(tmp_path: Path, form: str, dtype: str, nodata: Any) -> None:
    pixels = scene(SHAPE, dtype)
    source, tif = (write(tmp_path, each, pixels, nodata=nodata) for each in (form, "tif"))
    box = Box(Interval(-5, 90), Interval(30, 133))
    for how in ({}, {"bands": [3, 1]}, {"nodata": 9}):
        (ours, valid, info), (theirs, others, expected) = (read(each, box, **how) for each in (source, tif))
        assert np.array_equal(ours, theirs)
        assert np.array_equal(valid, others)
        assert (info.crs, info.transform, info.dtype) == (expected.crs, expected.transform, expected.dtype)
        assert (info.shape, info.bands, info.nodata) == (expected.shape, expected.bands, expected.nodata)


@pytest.mark.parametrize("form", ["zarr2", "zarr3", "dask"])
def test_each_chunk_is_read_once(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store, by threads and windows that overlap; of dask's array, none outside a window."""
    pixels, counts = scene(SHAPE), Counter[str]()
    source, get = write(tmp_path, form, pixels), LocalStore.get

    async def counted(store: Any, key: str, *more: Any) -> Any:
        counts.update([key] if re.fullmatch(r"reflectance/(c/)?\d.*", key) else [])
        return await get(store, key, *more)

    def counted_chunk(block: Any, block_info: Any = None) -> Any:
        counts.update([str(block_info[0]["chunk-location"])] if block_info else [])
        return block

    if form == "dask":
        source = source.copy(data=source.data.map_blocks(counted_chunk, dtype="uint16", meta=np.empty((0,) * 3, "u2")))
    monkeypatch.setattr(LocalStore, "get", counted)
    boxes = [
        Box(Interval(row, min(row + 60, 101)), Interval(col, min(col + 60, 120)))
        for row in range(0, 101, 20)
        for col in range(0, 120, 20)
    ]

    @takes_arrays
    def read_boxes(path: str) -> None:
        with open_raster(path) as reader:
            assert not counts
            reader.read(Box(Interval(0, 40), Interval(0, 40)))
            assert sum(counts.values()) == (1 if form == "dask" else 3)  # a chunk a band
            with ThreadPoolExecutor(4) as pool:
                for box, (found, _) in zip(boxes, pool.map(reader.read, boxes), strict=True):
                    assert np.array_equal(found, pixels[:, *box.slices])

    read_boxes(source)
    if form != "dask":
        assert set(counts.values()) == {1}
        assert len(counts) == 3 * 3 * 3


def test_names_are_of_stores_alone(tmp_path: Path) -> None:
    write(tmp_path, "zarr3", scene((20, 30)), "a")
    (tmp_path / "a-zarr3.zarr").rename(tmp_path / "folder")
    for path, expected in (
        ("s.zarr", ("s.zarr", "")),
        ("d/s.zarr/", ("d/s.zarr", "")),
        ("s.zarr:/a", ("s.zarr", "a")),
        ("s3://b/s.zarr:/g/a", ("s3://b/s.zarr", "g/a")),
        ("https://h:8080/s.zarr:/a", ("https://h:8080/s.zarr", "a")),
        ("s.nc:a", ("s.nc", "a")),
        (f"{tmp_path}/folder", (f"{tmp_path}/folder", "")),
        (f"{tmp_path}/folder:/a", (f"{tmp_path}/folder", "a")),
        ("netcdf:s.nc:a", None),
        ("netcdf:/d/s.nc:a", None),
        ("/vsicurl/http://h/s.nc", None),
        ("s.tif", None),
        ("s3://b/a.tif", None),
        ("s.zarr/a.tif", None),
    ):
        assert parse_array_name(path) == (None if expected is None else ArrayName(*expected)), path
    assert expand_sources([f"{tmp_path}/folder"], "k") == (f"{tmp_path}/folder",)


def test_stores_of_a_glob_are_found(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path, "zarr3", scene((20, 30)), name)
        (tmp_path / f"{name}-zarr3.zarr").rename(tmp_path / f"{name}.zarr")
    found = expand_sources([f"{tmp_path}/*.zarr:/a"], "data.images")
    assert found == (f"{tmp_path}/a.zarr:/a", f"{tmp_path}/b.zarr:/a")
    for pattern, words in (
        (f"{tmp_path}/c*.zarr", "nothing matches"),
        (f"{tmp_path}/c.zarr:/x", "does not exist"),
        ("s3://b/*.zarr", "name each"),
    ):
        with pytest.raises(RasterError, match=words):
            expand_sources([pattern], "data.images")


def test_a_store_of_a_web_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    pixels, source = scene(SHAPE), write(tmp_path, "zarr2", scene(SHAPE))
    with running(range_server.__file__, str(tmp_path)) as address:
        url = source.replace(str(tmp_path), f"http://{address}")
        assert np.array_equal(read(url)[0], pixels)
        chunks(tmp_path)[0].unlink()
        with pytest.raises(RasterError, match=r"has no chunk reflectance/0.0.0"):
            read(url)
    with pytest.raises(RasterError, match="the server does not answer") as refusal:
        read(url)
    assert "\n" not in str(refusal.value)


def test_workers_of_other_processes_have_the_arrays(tmp_path: Path) -> None:
    """A copy by pickle, as a DataLoader sends one, and names that are taken back in the end."""
    image, labels = (
        write(tmp_path, "memory", scene((3, 40, 50)), "a"),
        write(tmp_path, "memory", scene((40, 50)) % 2, "b"),
    )
    dataset = TileDataset(image, labels, halo=4, grid=2, classes=2)
    words = pickle.dumps(dataset)
    names, first = dict(array_names._arrays), dataset[0]
    array_names._arrays.clear()
    other = pickle.loads(words)
    assert all(torch.equal(other[0][key], first[key]) for key in ("image", "mask", "bounds"))
    array_names._arrays.update(names)
    del dataset
    gc.collect()
    assert not array_names._arrays


@pytest.mark.parametrize("form", STORES)
def test_an_edited_file_is_noticed(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(Path(), form, scene((101, 120)))
    before = identify(path, read(path, Box.of_shape((101, 120)))[2].beside)
    assert written_since([before]) == ()
    file = Path(path.partition(":/")[0]) if form.startswith("nc") else chunks(tmp_path)[-1]
    os.utime(file, (0, file.stat().st_mtime + 5))
    assert written_since([before]) == (path,)


def test_labels_and_maps_are_named_by_stores(tmp_path: Path) -> None:
    (tmp_path / "gt").mkdir()
    for folder, name in ((tmp_path, "a"), (tmp_path, "b"), (tmp_path / "gt", "a"), (tmp_path / "gt", "b")):
        write(folder, "zarr3", scene((20, 30)), name)
    images, labels = (
        [f"{folder}/{name}-zarr3.zarr:/{name}" for name in "ab"] for folder in (tmp_path, tmp_path / "gt")
    )
    assert pair_sources(images, labels, ("i", "l")) == (tuple(images), tuple(labels))
    pattern = f"{tmp_path}/gt/{{stem}}.zarr"
    assert pair_sources(images, [pattern], ("i", "l"))[1] == tuple(each.partition(":/")[0] for each in labels)
    with pytest.raises(RasterError, match=r"has no labels .*none.zarr:/x"):
        pair_sources(images, [f"{tmp_path}/{{stem}}none.zarr:/x"], ("i", "l"))
    assert ArrayName("/d/a.zarr", "g/r").stem == "a-g/r"


def chunks(folder: Path) -> list[Path]:
    """The files of the chunks of the variable `reflectance`."""
    files = sorted(folder.glob("*.zarr/reflectance/**/*"))
    return [file for file in files if file.is_file() and file.name[0].isdigit()]


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


@pytest.mark.parametrize("form", STORES)
def test_a_wrong_variable_is_one_line(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form, scene(SHAPE)).removesuffix(":/reflectance")
    assert read(path)[2].bands == 3, "the only one need not be named"
    for name, words in (
        ("absent", "has no variable absent; give one of: .*:/reflectance"),
        ("x", "has the dims x, without rows"),
        ("g/r", "cannot open|has no group|no groups"),
    ):
        with pytest.raises(RasterError, match=words):
            read(f"{path}:/{name}")


def test_groups_and_several_variables(tmp_path: Path) -> None:
    path, other = tmp_path / "s.zarr", as_array(scene((50, 60), seed=1), "other")
    for group, name in (("r10m", "b02"), ("r10m", "b03")):
        as_array(scene((50, 60)), name).to_dataset().to_zarr(path, group=group, mode="a", consolidated=False)
    assert read(f"{path}:/r10m/b03")[2].crs == CRS
    with pytest.raises(RasterError, match=r"has no variable b04; give one of: .*:/r10m/b02, .*:/r10m/b03"):
        read(f"{path}:/r10m/b04")
    with pytest.raises(RasterError, match="0 variables with x and y"):
        read(str(path))
    assert np.array_equal(read(other, Box.of_shape((50, 60)))[0][0], scene((50, 60), seed=1))


@pytest.mark.parametrize("form", ["zarr3", "nc4"])
def test_bands_of_several_stores_are_those_of_one(tmp_path: Path, form: str) -> None:
    """Without data is what all bands of unsigned pixels hold, whichever store they are in."""
    pixels = scene(SHAPE) % 3
    parts = tuple(write(tmp_path, form, band, f"b{at}", nodata=0) for at, band in enumerate(pixels))
    whole = write(tmp_path, "tif", pixels, nodata=0)
    (ours, valid, _), (theirs, others, _) = read(str(Composed("all", BANDS, parts))), read(whole)
    assert np.array_equal(ours, theirs)
    assert np.array_equal(valid, others)
    assert not valid.all()


def test_stores_of_several_times_are_joined(tmp_path: Path) -> None:
    pixels = scene((2, 20, 30)), scene((2, 20, 30), seed=1)
    for at, each in enumerate(pixels):
        write(tmp_path, "zarr3", each, "r")
        (tmp_path / "r-zarr3.zarr").rename(tmp_path / f"t{at}.zarr")
    (path,) = expand_sources([f"{tmp_path}/t{{0,1}}.zarr:/r"], "data.images")
    assert np.array_equal(read(path, Box.of_shape((20, 30)))[0], np.concatenate(pixels))


def test_places_as_others_write_them() -> None:
    plain = as_array(scene((3, 20, 30)))
    corner = plain.assign_coords(x=plain.x - 5, y=plain.y + 5).drop_vars("spatial_ref").assign_coords(epsg=32633)
    corner.attrs = {"transform": TRANSFORM, "crs": "epsg:32633"}  # stackstac
    named = plain.rename(x="longitude", y="latitude", band="spectral").transpose("latitude", "longitude", "spectral")
    code = plain.drop_vars(["spatial_ref", "x", "y"])
    code.attrs = {"proj:code": CRS, "spatial:transform": list(TRANSFORM)[:6]}  # GeoZarr
    window = {"x": slice(3, None), "y": slice(2, 11)}
    for array, moved in (
        (plain, (0, 0)),
        (corner, (0, 0)),
        (named, (0, 0)),
        (code, (0, 0)),
        (plain.isel(window), (3, 2)),
        (corner.isel(window), (3, 2)),
        (plain.expand_dims("time"), (0, 0)),
    ):
        pixels, _, info = read(array, Box(Interval(0, 9), Interval(0, 9)))
        assert (info.crs, info.transform) == (CRS, TRANSFORM @ Affine.translation(*moved)), array
        assert np.array_equal(pixels, plain.values[:, moved[1] : moved[1] + 9, moved[0] : moved[0] + 9])
    coarse = plain.isel(x=slice(0, None, 2), y=slice(0, None, 2))
    assert read(coarse, Box(Interval(0, 9), Interval(0, 9)))[2].transform.a == 20
    labels = plain[0].assign_attrs(flag_values=np.array([0, 1]), flag_meanings="water land")
    assert read(labels, Box(Interval(0, 1), Interval(0, 1)))[2].class_names == ((0, "water"), (1, "land"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (xarray.DataArray(np.zeros((2, 3, 4)), dims=("a", "b", "c")), "has the dims a, b, c, without rows and columns"),
        (as_array(scene((3, 20, 30))).expand_dims(time=2), "has the dims time 2, band 3 beside y and x"),
        (as_array(scene((20, 30)) > 3), "holds bool pixels"),
        (as_array(scene((3, 0, 30))), "has no pixel: "),
        (as_array(scene((20, 30))).assign_coords(spatial_ref=((), 0, {"crs_wkt": "/etc/passwd"})), "has the CRS"),
    ],
)
def test_arrays_that_are_no_rasters(array: Any, words: str) -> None:
    with pytest.raises(RasterError, match=words):
        read(array, Box(Interval(0, 1), Interval(0, 1)))
