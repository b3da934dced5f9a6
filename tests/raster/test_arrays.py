"""Zarr stores, netCDF files and DataArrays as rasters: the pixels and the place of the GeoTIFF of the same scene."""

import gc
import os
import pickle
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from affine import Affine
from zarr.storage import LocalStore

from tests.array_scenes import CRS, FORMS, STORES, TRANSFORM, as_array, chunks, scene, write
from tests.raster import range_server
from tests.raster.range_server import running
from tiledseg.errors import RasterError
from tiledseg.foreign.tile_dataset import TileDataset
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import array_names, array_open
from tiledseg.raster.array_names import ArrayName, parse_array_name, takes_arrays
from tiledseg.raster.composed import files_of, parse_raster
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


@pytest.mark.parametrize(("form", "times"), [("zarr2", 1), ("zarr3", 1), ("nc4", 1), ("dask", 1), ("dask", 2)])
def test_each_chunk_is_read_once(tmp_path: Path, form: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, times and windows that overlap read a store's chunk once; no chunk outside a window is read."""
    pixels, counts = scene((times, *SHAPE) if times > 1 else SHAPE), Counter[str]()
    source, get = write(tmp_path, form, pixels), LocalStore.get
    pixels = pixels.reshape(-1, *SHAPE[1:])

    async def counted(store: Any, key: str, *more: Any) -> Any:
        counts.update([key] if re.fullmatch(r"reflectance/(c/)?\d.*", key) else [])
        return await get(store, key, *more)

    def counted_chunk(block: Any, block_info: Any = None) -> Any:
        counts.update([str(block_info[0]["chunk-location"])] if block_info else [])
        return block

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    if form == "dask":
        monkeypatch.setattr(array_open, "CACHE_BYTES", 9 * source.data.blocks[0, 0, 0].nbytes)
        source = source.copy(data=source.data.map_blocks(counted_chunk, dtype="uint16", meta=np.empty((0,) * 3, "u2")))
    monkeypatch.setattr(LocalStore, "get", counted)
    boxes = [
        Box(Interval(row, min(row + 60, 101)), Interval(col, min(col + 60, 120)))
        for row in range(0, 101, 20)
        for col in range(0, 120, 20)
    ]

    @takes_arrays
    def read_boxes(path: str) -> int:
        with open_raster(path) as reader:
            assert not counts
            reader.read(Box(Interval(0, 40), Interval(0, 40)))
            assert sum(counts.values()) == {"dask": 1, "nc4": 0}.get(form, 3)  # a chunk a band
            before = bytes_read()
            with ThreadPoolExecutor(4) as pool:
                for box, (found, _) in zip(boxes, pool.map(reader.read, boxes), strict=True):
                    assert np.array_equal(found, pixels[:, *box.slices])
            taken, seen = bytes_read() - before, counts.copy()
            for end in (reader.release, reader.close) if form == "dask" else ():
                end()  # forgets the chunks
                reader.read(Box(Interval(0, 4), Interval(0, 4)))
                reader.read(Box(Interval(0, 4), Interval(0, 4)))
                assert sum((counts - seen).values()) == 1
                counts.clear()
                counts.update(seen)
        return taken

    taken = read_boxes(source)
    if form == "nc4":  # HDF5 alone knows its chunks
        assert taken <= (tmp_path / "reflectance-nc4.nc").stat().st_size
    else:
        assert set(counts.values()) == {1}
        assert len(counts) == (1 if form == "dask" else 3) * 3 * 3


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
    (joined,) = expand_sources([f"{tmp_path}/{{a,b}}.zarr:/a"], "data.images")
    assert files_of(parse_raster(joined)) == [*found]
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
    with pytest.raises(RasterError, match=r"does not answer .*; check that its server can be reached") as refusal:
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
    bare = other.drop_vars(["x", "y", "spatial_ref"]).to_dataset()
    bare.to_zarr(path, group="r10m/inner", mode="a", consolidated=False)  # coordinates are of the group around it
    for name in ("r10m/b03", "r10m/inner/other"):
        info = read(f"{path}:/{name}", Box.of_shape((50, 60)))[2]
        assert (info.crs, info.transform) == (CRS, TRANSFORM)
    with pytest.raises(RasterError, match=r"has no variable b04; give one of: .*:/r10m/b02, .*:/r10m/b03"):
        read(f"{path}:/r10m/b04")
    with pytest.raises(RasterError, match="0 variables with x and y"):
        read(str(path))
    assert np.array_equal(read(other, Box.of_shape((50, 60)))[0][0], scene((50, 60), seed=1))


@pytest.mark.parametrize("form", ["zarr3", "nc4", "dask"])
def test_an_array_of_times_is_read_as_rasters_of_each(tmp_path: Path, form: str) -> None:
    """Bands of the first time come first; without data is what all bands of one time are, and bands are of each."""
    pixels = scene((3, 2, 20, 30)) % 3
    pixels[0, :, 4, 5] = pixels[1, :, 5, 6] = 0
    times = [as_array(one, nodata=0) for one in pixels]
    array = xarray.concat(times, "time").assign_coords(time=np.array(["2024-06", "2024-04", "2024-08"], "M8[ns]"))
    array = array.transpose("y", "band", "time", "x").chunk(y=7)
    path = str(tmp_path / ("a.zarr" if form == "zarr3" else "a.nc"))
    if form == "zarr3":
        array.to_dataset().to_zarr(path, consolidated=False)
    elif form == "nc4":
        array.to_dataset().to_netcdf(path, engine="h5netcdf")
    for bands in ([1, 2], [2]):
        found, valid, info = read(array if form == "dask" else path, Box.of_shape((20, 30)), bands=bands)
        own = pixels[:, [band - 1 for band in bands]]
        assert np.array_equal(found, own.reshape(-1, 20, 30))
        assert np.array_equal(valid, (own != 0).any(1).all(0))
        assert (info.times, info.bands, info.crs, info.transform) == (3, 3 * len(bands), CRS, TRANSFORM)


def test_unsigned_pixels_of_netcdf_3_are_read_as_such(tmp_path: Path) -> None:
    pixels = np.arange(600, dtype="u2").reshape(20, 30) * 109
    how: dict[str, Any] = {"reflectance": {"dtype": "i2", "_Unsigned": "true", "_FillValue": pixels[19, 5]}}
    as_array(pixels).to_dataset().to_netcdf(tmp_path / "a.nc", engine="scipy", encoding=how)
    found, valid, info = read(str(tmp_path / "a.nc"), Box.of_shape((20, 30)))
    assert (info.dtype, info.nodata) == ("uint16", pixels[19, 5])
    assert np.array_equal(found[0], pixels)
    assert np.array_equal(valid, pixels != pixels[19, 5])


def test_what_was_decoded_has_not_the_value_of_its_file() -> None:
    array = as_array(scene((20, 30), "float32"))
    array.encoding["_FillValue"] = 7
    assert read(array, Box.of_shape((20, 30)))[1].all()
    for name, value in (("nodatavals", (7, 7)), ("_FillValue", np.array([7])), ("missing_value", 7)):
        valid = read(array.assign_attrs({name: value}), Box.of_shape((20, 30)))[1]
        assert np.array_equal(valid, array.values != 7)


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
    pixel = code.isel(x=slice(3, 4), y=[2]).assign_coords(y=plain.y[[2]], x=plain.x[3:4])
    assert read(pixel, Box.of_shape((1, 1)))[2].transform == TRANSFORM @ Affine.translation(3, 2)
    upward = code.assign_coords(x=np.arange(30, dtype="u1"), y=np.arange(20, dtype="u2")[::-1])
    assert read(upward, Box.of_shape((2, 2)))[2].transform == Affine(1, 0, -0.5, 0, -1, 19.5)
    coarse = plain.isel(x=slice(0, None, 2), y=slice(0, None, 2))
    assert read(coarse, Box(Interval(0, 9), Interval(0, 9)))[2].transform.a == 20
    labels = plain[0].assign_attrs(flag_values=np.array([0, 1]), flag_meanings="water land")
    assert read(labels, Box(Interval(0, 1), Interval(0, 1)))[2].class_names == ((0, "water"), (1, "land"))
