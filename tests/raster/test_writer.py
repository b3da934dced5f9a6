"""Writing a raster from many ranks, and maps as people open them, held to the plain file and to rio cogeo's rules."""

import contextlib
import errno
import fcntl
import pickle
import resource
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
import rasterio
from affine import Affine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rasterio.crs import CRS
from rasterio.enums import ColorInterp
from rasterio.errors import RasterioIOError
from rio_cogeo.cogeo import cog_validate

from tests.raster.referring import category_names
from tiledseg.config.words import COG, COMPRESSIONS, PLAIN, Packing
from tiledseg.errors import OutputError, WriteError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster import map_writer
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.map_writer import RasterLayout, pack_layout, publish, raster_output, raster_writer
from tiledseg.system.outputs import files_below, unfinished

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
    with raster_writer(layout) as write:
        for box in boxes:
            write(box, pixels_CHW[:, *box.slices])


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
    nodata=st.sampled_from([None, 0, 255]),
    place=st.sampled_from([(UTM, PLACE), (None, Affine.identity())]),
)
def test_any_partition_in_any_order_gives_the_bytes_of_one_write(
    tmp_path: Path, data: st.DataObject, height: int, width: int, bands: int, dtype: str, nodata: Any, place: Any
) -> None:
    """And the grid of any raster, without a warning if it has no place."""
    pixels_CHW = pixels_of((bands, height, width), dtype)
    whole = Box.of_shape((height, width))
    boxes = data.draw(st.permutations(partition(data, whole, 4)))
    files = []
    for name, parts in (("one", [whole]), ("many", boxes)):
        with warnings.catch_warnings(), unfinished(tmp_path / f"{name}.tif") as output:
            warnings.simplefilter("error")
            layout = RasterLayout(output, Info(height, width, *place), bands, dtype, nodata)
            write_boxes(pickle.loads(pickle.dumps(layout)), parts, pixels_CHW)
            publish(layout)
        files.append(tmp_path / f"{name}.tif")
    assert files[0].read_bytes() == files[1].read_bytes()
    with rasterio.open(files[1]) as dataset:
        np.testing.assert_array_equal(dataset.read(), pixels_CHW)
        assert (dataset.crs, dataset.transform, dataset.nodata) == (*place, nodata)


def test_laying_out_a_large_file_writes_little(tmp_path: Path) -> None:
    """Bytes are written once, by their owners: the layout itself leaves holes. Also a BigTIFF."""
    if shutil.disk_usage(tmp_path).free < 6 * 10**9:
        pytest.skip("a file of 5 GB is refused where so much is not free")
    with unfinished(tmp_path / "p.tif") as output:
        layout = RasterLayout(output, Info(20000, 20000), 3, "float32", 255)
        status = layout.plain.stat()
        assert status.st_size > 4 * 10**9
        assert status.st_blocks * 512 < status.st_size / 100
        corner = Box(Interval(19998, 20000), Interval(19999, 20000))
        with raster_writer(layout) as write:
            write(corner, np.full((3, 2, 1), 7.5, "float32"))
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
    with suppress(ZeroDivisionError), unfinished(path) as output:
        RasterLayout(output, Info(30, 40), 1, "uint8")
        raise ZeroDivisionError
    assert (path.read_bytes(), overview.exists(), len(list(tmp_path.iterdir()))) == (b"old", True, 2)
    (tmp_path / ".a.tif.part").mkdir()
    (tmp_path / ".a.tif.part" / "whole.aux.xml").write_bytes(b"of a killed job")
    with unfinished(path) as output:
        publish(RasterLayout(output, Info(30, 40), 1, "uint8", 255))
    with rasterio.open(path) as dataset:
        assert (dataset.read() == 0).all()
    assert list(tmp_path.iterdir()) == [path]


def test_two_jobs_with_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks, the second takes the first one's place (else: test_outputs.py)."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    path = tmp_path / "a.tif"
    monkeypatch.setattr(fcntl, "flock", none)
    with unfinished(path) as mine, unfinished(path) as others:
        first, second = RasterLayout(others, Info(30, 40), 1, "uint8"), RasterLayout(others, Info(30, 40), 1, "uint8")
        first.output = mine
        for act in (lambda layout: raster_writer(layout).__enter__(), pack_layout, publish):
            with pytest.raises(OutputError, match="another job"):
                act(first)
        mine.discard()
        publish(second)
        with pytest.raises(WriteError, match=r"a\.tif: No such file"):
            publish(second)
        with pytest.raises(OutputError, match="file system"), raster_writer(second):
            pass


def test_an_output_that_no_guard_has_looked_at_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "missing" / "a.tif", tmp_path / "file" / "a.tif"):
        with pytest.raises(OutputError, match=r"cannot write .*a\.tif"), unfinished(path):
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    with unfinished(tmp_path / "a.tif") as output:
        layout = RasterLayout(output, Info(30, 40), 1, "uint8")
        layout.plain.unlink()
        layout.plain.symlink_to("/dev/full")
        with pytest.raises(WriteError, match=r"a\.tif: No space left on device; make room"):
            write_boxes(layout, [Box.of_shape((30, 40))], np.zeros((1, 30, 40), np.uint8))


LEGEND = [ClassRecord("water", (0, 0, 255)), ClassRecord("a & <b>", (1, 2, 3)), ClassRecord("Straße", (9, 8, 7))]
WAYS = [PLAIN, *(Packing(COG, compress) for compress in COMPRESSIONS)]  # stores: test_arrays.py


def classes_of(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Patches of classes, a corner without data."""
    coarse_HW = np.random.default_rng(seed).integers(0, 3, (-(-height // 9), -(-width // 7)))
    found_HW = np.kron(coarse_HW, np.ones((9, 7)))[:height, :width].astype(np.uint8)
    found_HW[: height // 5, : width // 4] = 255
    return found_HW


def write_map(path: Path, pixels_CHW: NDArray, how: Packing, threads: int = 1, **meaning: object) -> None:
    bands, height, width = pixels_CHW.shape
    with unfinished(path) as output:
        layout = RasterLayout(output, Info(height, width), bands, str(pixels_CHW.dtype), packing=how, **meaning)  # type: ignore[arg-type]
        write_boxes(layout, [Box.of_shape((height, width))], pixels_CHW)
        pack_layout(layout, threads)
        publish(layout)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: f"{how.format}-{how.compress}")
def test_every_way_keeps_the_map(tmp_path: Path, how: Packing) -> None:
    classes_HW = classes_of(1100, 700)
    write_map(tmp_path / "map.tif", classes_HW[None], how, nodata=255.0, legend=LEGEND)
    style = (tmp_path / "map.qml").read_text()
    (tmp_path / "map.qml").write_text("my own")
    write_map(tmp_path / "map.tif", classes_HW[None], how, nodata=255.0, legend=LEGEND)
    assert (tmp_path / "map.qml").read_text() == "my own"
    with rasterio.open(tmp_path / "map.tif") as made:
        np.testing.assert_array_equal(made.read(1), classes_HW)
        assert (made.crs, made.transform, made.nodata) == (UTM, PLACE, 255)
        assert [made.colormap(1)[k][:3] for k in range(3)] == [one.colour for one in LEGEND]
        assert (made.profile.get("compress") or "none") == ("none" if how == PLAIN else how.codec)
        assert made.block_shapes == [(512, 512)]
        assert bool(made.overviews(1)) == (how.format == "cog")
    names = [one.name for one in LEGEND]
    assert category_names(tmp_path / "map.tif") == names
    entries = Xml.fromstring(style).findall(".//paletteEntry")
    assert [(e.get("value"), e.get("label"), e.get("color")) for e in entries] == [
        ("0", "water", "#0000ff"),
        ("1", "a & <b>", "#010203"),
        ("2", "Straße", "#090807"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"map.tif", "map.tif.aux.xml", "map.qml"}
    valid, faults, warnings = cog_validate(tmp_path / "map.tif", strict=True)
    assert valid == (how.format == "cog"), (faults, warnings)


@settings(derandomize=True, max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(height=st.integers(1, 1300), width=st.integers(1, 1300), seed=st.integers(0, 99), threads=st.integers(1, 3))
def test_a_cog_of_any_size_is_valid_and_does_not_depend_on_threads(
    tmp_path: Path, height: int, width: int, seed: int, threads: int
) -> None:
    classes_HW = classes_of(height, width, seed)
    for name, count in (("one", 1), ("many", threads)):
        write_map(tmp_path / f"{name}.tif", classes_HW[None], Packing(), count, nodata=255.0)
    assert (tmp_path / "one.tif").read_bytes() == (tmp_path / "many.tif").read_bytes()
    assert cog_validate(tmp_path / "one.tif", strict=True) == (True, [], [])
    with rasterio.open(tmp_path / "one.tif") as made:
        np.testing.assert_array_equal(made.read(1), classes_HW)


def test_an_overview_has_the_class_of_most_pixels_with_data(tmp_path: Path) -> None:
    """By counting, where one class leads; what has no data does not vote."""
    classes_HW = classes_of(1024, 1024)
    write_map(tmp_path / "map.tif", classes_HW[None], Packing(), nodata=255.0)
    with rasterio.open(tmp_path / "map.tif", overview_level=0) as half:
        found_HW = half.read(1)
    fours = classes_HW.reshape(512, 2, 512, 2).swapaxes(1, 2).reshape(512, 512, 4)
    votes = np.stack([(fours == k).sum(-1) for k in range(3)], -1)
    ordered = np.sort(votes, -1)
    clear_HW = ordered[..., -1] > ordered[..., -2]
    assert clear_HW.mean() > 0.7
    np.testing.assert_array_equal(found_HW[clear_HW], votes.argmax(-1)[clear_HW])
    np.testing.assert_array_equal(found_HW == 255, votes.sum(-1) == 0)


@pytest.mark.parametrize(("how", "compress"), [(Packing(COG, "zstd"), "zstd"), (Packing(), "none"), (PLAIN, "none")])
def test_every_way_keeps_shares(tmp_path: Path, how: Packing, compress: str) -> None:
    """Each bit of them, on any threads; the compression of each kind; and an overview of a COG has their mean."""
    shares_CHW, path = np.random.default_rng(4).random((4, 1024, 600), np.float32) ** 8, tmp_path / "p.tif"
    shares_CHW[:, :100, :101] = np.nan
    files = []
    for threads in (1, 2):
        write_map(path, shares_CHW, how.of_shares(), threads, nodata=float("nan"), descriptions="abcd")
        files.append(path.read_bytes())
    assert files[0] == files[1]
    with rasterio.open(path) as made:
        assert np.array_equal(made.read().view(np.uint8), shares_CHW.view(np.uint8))
        assert (made.profile.get("compress") or "none") == compress
        assert made.descriptions == tuple("abcd")
        assert ColorInterp.alpha not in made.colorinterp, "four bands are four classes"
    assert list(tmp_path.iterdir()) == [path]
    assert cog_validate(path, strict=True)[0] == (how.format == COG)
    if how.format == COG:
        fours = shares_CHW.reshape(4, 512, 2, 300, 2).swapaxes(2, 3).reshape(4, 512, 300, 4)
        with rasterio.open(path, overview_level=0) as half, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing
            np.testing.assert_allclose(half.read(), np.nanmean(fours, -1), rtol=1e-6)


def test_the_disk_that_is_asked_for_is_enough(tmp_path: Path) -> None:
    """Noise, which does not compress: the files on the disk while GDAL packs are never more."""
    random = np.random.default_rng(3)
    shares = Packing().of_shares()
    for how, shape in [*((how, (1024, 1536)) for how in (*WAYS[:3], shares)), (Packing("cog", "none"), (60, 4000))]:
        dtype = "float32" if how is shares else "uint8"
        noise_CHW = random.integers(0, 255, (1, *shape)).astype(dtype)
        seen = []

        def measure(seen: list[int] = seen) -> None:
            seen.append(0)
            for path in files_below(tmp_path):
                with contextlib.suppress(FileNotFoundError):
                    seen[-1] += path.stat().st_size

        with pytest.MonkeyPatch.context() as patch, unfinished(tmp_path / "n.tif") as output:
            patch.setattr(map_writer, "_LOOK_SECONDS", 0.002)
            layout = RasterLayout(output, Info(*shape), 1, dtype, packing=how)
            write_boxes(layout, [Box.of_shape(shape)], noise_CHW)
            pack_layout(layout, beat=measure)
            measure()
        asked = raster_output("--output", tmp_path / "n.tif", Info(*shape), 1, dtype, how).size
        assert max(seen) <= asked + 4096, how


@pytest.mark.parametrize("fails", ["copy", "kept", "disk"])
def test_a_packing_that_fails_leaves_the_older_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    (tmp_path / "map.tif").write_bytes(b"old")
    meaning = map_writer.meaning

    def broken(*_: object, **__: object) -> None:
        raise RasterioIOError("No space left on device")

    if fails == "copy":
        monkeypatch.setattr(map_writer.rasterio.shutil, "copy", broken)
    elif fails == "kept":
        monkeypatch.setattr(map_writer, "meaning", lambda dataset: {**meaning(dataset), "CRS": id(dataset)})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = {
        "copy": "No space left",
        "kept": "not kept the CRS",
        "disk": r"cannot write .*map.tif: .*; see that it can be written",
    }[fails]
    try:
        if fails == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))
        with pytest.raises(WriteError, match=words):
            write_map(tmp_path / "map.tif", classes_of(40, 50)[None], Packing())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "map.tif").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"map.tif"}
