from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rasterio.crs import CRS

from tiledseg.errors import OutputError, WriteError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import map_writer as writer
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.map_writer import RasterLayout, RasterWriter, lay_out, pack_layout, publish

UTM = CRS.from_epsg(32611)
PLACE = Affine(0.5, 0, 350000, 0, -0.5, 3770000)


def Info(  # noqa: N802
    height: int, width: int, crs: Any = UTM, transform: Any = PLACE, path: str = "source.tif"
) -> RasterInfo:
    return RasterInfo(path, height, width, 1, "uint8", crs, transform)


def pixels_of(shape: tuple[int, int, int], dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 200, shape)
    return (values / 7).astype(dtype) if dtype == "float32" else values.astype(dtype)


def write_boxes(layout: RasterLayout, boxes: list[Box], pixels_CHW: np.ndarray) -> None:
    with RasterWriter(layout) as out:
        for box in boxes:
            out.write(box, pixels_CHW[:, *box.slices])


def partition(data: st.DataObject, box: Box, depth: int) -> list[Box]:
    """Any guillotine cutting of a box."""
    if depth == 0 or box.area < 2 or not data.draw(st.booleans()):
        return [box]
    interval = box.row if (data.draw(st.booleans()) and box.height > 1) or box.width < 2 else box.col
    at = data.draw(st.integers(interval.start + 1, interval.stop - 1))
    first, second = Interval(interval.start, at), Interval(at, interval.stop)
    halves = [Box(half, box.col) if interval is box.row else Box(box.row, half) for half in (first, second)]
    return [part for half in halves for part in partition(data, half, depth - 1)]


@settings(derandomize=True, max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    height=st.integers(1, 1300),
    width=st.integers(1, 1300),
    bands=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "uint16", "float32"]),
)
def test_any_partition_in_any_order_gives_the_bytes_of_one_write(
    tmp_path: Path, data: st.DataObject, height: int, width: int, bands: int, dtype: str
) -> None:
    pixels_CHW = pixels_of((bands, height, width), dtype)
    whole = Box.of_shape((height, width))
    boxes = data.draw(st.permutations(partition(data, whole, 4)))
    files = []
    for name, parts in (("one", [whole]), ("many", boxes)):
        layout = lay_out(tmp_path / f"{name}.tif", Info(height, width), bands, dtype, nodata=255)
        write_boxes(pickle.loads(pickle.dumps(layout)), parts, pixels_CHW)
        publish(layout)
        files.append(tmp_path / f"{name}.tif")
    assert files[0].read_bytes() == files[1].read_bytes()
    with rasterio.open(files[1]) as dataset:
        np.testing.assert_array_equal(dataset.read(), pixels_CHW)


@pytest.mark.parametrize("nodata", [None, 0, 255])
def test_no_crs_and_any_nodata(tmp_path: Path, nodata: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = lay_out(tmp_path / "a.tif", Info(30, 40, None, Affine.identity()), 1, "uint8", nodata)
    write_boxes(layout, [Box.of_shape((30, 40))], pixels_of((1, 30, 40)))
    publish(layout)
    with rasterio.open(tmp_path / "a.tif") as dataset:
        assert dataset.crs is None
        assert dataset.nodata == nodata
        np.testing.assert_array_equal(dataset.read(), pixels_of((1, 30, 40)))


def test_laying_out_a_large_file_writes_little(tmp_path: Path) -> None:
    """Bytes are written once, by their owners: the layout itself leaves holes. Also a BigTIFF."""
    if shutil.disk_usage(tmp_path).free < 6 * 10**9:
        pytest.skip("a file of 5 GB is refused where so much is not free")
    layout = lay_out(tmp_path / "p.tif", Info(20000, 20000), 3, "float32", 255)
    status = layout.temporary.stat()
    assert status.st_size > 4 * 10**9
    assert status.st_blocks * 512 < status.st_size / 100
    corner = Box(Interval(19998, 20000), Interval(19999, 20000))
    with RasterWriter(layout) as out:
        out.write(corner, np.full((3, 2, 1), 7.5, "float32"))
    publish(layout)
    with rasterio.open(tmp_path / "p.tif") as dataset:
        window = rasterio.windows.Window(19997, 19997, 3, 3)
        expected = np.zeros((3, 3, 3))
        expected[:, 1:, 2] = 7.5
        np.testing.assert_array_equal(dataset.read(window=window), expected)


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """Leftovers of a killed job do not matter."""
    path, overview = tmp_path / "a.tif", tmp_path / "a.tif.ovr"
    path.write_bytes(b"old")
    overview.write_bytes(b"old")
    lay_out(path, Info(30, 40), 1, "uint8").discard()
    assert (path.read_bytes(), overview.exists()) == (b"old", True)
    first = lay_out(path, Info(30, 40), 1, "uint8", 255)
    write_boxes(first, [Box.of_shape((30, 40))], np.full((1, 30, 40), 9, np.uint8))
    publish(lay_out(path, Info(30, 40), 1, "uint8", 255))
    with rasterio.open(path) as dataset:
        assert (dataset.read() == 0).all()
    assert not overview.exists()


def test_two_jobs_with_one_output(tmp_path: Path) -> None:
    first = lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    (tmp_path / "keep").hardlink_to(first.temporary)  # so that its inode is not given out again
    second = lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    for act in (RasterWriter, pack_layout, publish):
        with pytest.raises(OutputError, match="another job"):
            act(first)
    first.discard()
    publish(second)
    with pytest.raises(WriteError, match=r"a\.tif: No such file"):
        publish(second)
    with pytest.raises(OutputError, match="file system"):
        RasterWriter(second)


def test_misuse_is_refused(tmp_path: Path) -> None:
    layout = lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    out = RasterWriter(layout)
    for box, pixels_CHW, words in (
        (Box.of_shape((30, 40)), np.zeros((1, 30, 40), np.int64), "uint8"),
        (Box.of_shape((30, 40)), np.zeros((2, 30, 40), np.uint8), "wants"),
        (Box.of_shape((31, 40)), np.zeros((1, 31, 40), np.uint8), "inside"),
    ):
        with pytest.raises(ValueError, match=words):
            out.write(box, pixels_CHW)
    out.close()
    out.close()


def test_a_file_that_cannot_be_laid_out_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse an output that no guard has looked at."""
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "missing" / "a.tif", tmp_path / "file" / "a.tif"):
        with pytest.raises(OutputError, match=r"cannot write .*a\.tif"):
            lay_out(path, Info(30, 40), 1, "uint8")

    def broken(*_: object) -> np.ndarray:
        raise OutputError("cannot write: its blocks overlap")

    monkeypatch.setattr(writer, "block_offsets", broken)
    with pytest.raises(OutputError, match="overlap"):
        lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    layout = lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    out = RasterWriter(layout)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, out._descriptor)
    os.close(full)
    with pytest.raises(WriteError, match=r"a\.tif: No space left on device; make room"):
        out.write(Box.of_shape((30, 40)), np.zeros((1, 30, 40), np.uint8))
