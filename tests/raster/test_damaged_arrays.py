"""Zarr stores, netCDF files and DataArrays that are damaged, lead elsewhere, or are no rasters: one line each."""

from __future__ import annotations

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
from tiledseg.errors import InputError, RasterError
from tiledseg.geometry.box import Box, Interval


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
