"""Maps as people open them: what each format and compression keeps, held to the plain file and to rio cogeo's rules."""

from __future__ import annotations

import contextlib
import itertools
import resource
import warnings
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
import rasterio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rasterio.enums import ColorInterp
from rasterio.errors import RasterioIOError
from rio_cogeo.cogeo import cog_validate

from tests.raster.referring import category_names
from tests.raster.test_writer import PLACE, UTM, Info, write_boxes
from tiledseg.config.map_formats import COG, COMPRESSIONS, GTIFF, PLAIN, BlockBytes, Packing, block_bytes
from tiledseg.errors import WriteError
from tiledseg.geometry.box import Box
from tiledseg.raster import tiff_files
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.map_writer import lay_out, pack_layout, publish, raster_output

LEGEND = [ClassRecord("water", (0, 0, 255)), ClassRecord("a & <b>", (1, 2, 3)), ClassRecord("Straße", (9, 8, 7))]
WAYS = [Packing(*pair) for pair in itertools.product((COG, GTIFF), COMPRESSIONS)]  # stores: test_arrays.py


def classes_of(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Patches of classes, a corner without data."""
    coarse_HW = np.random.default_rng(seed).integers(0, 3, (-(-height // 9), -(-width // 7)))
    found_HW = np.kron(coarse_HW, np.ones((9, 7)))[:height, :width].astype(np.uint8)
    found_HW[: height // 5, : width // 4] = 255
    return found_HW


def write_map(path: Path, pixels_CHW: NDArray, how: Packing, threads: int = 1, **meaning: object) -> None:
    bands, height, width = pixels_CHW.shape
    layout = lay_out(path, Info(height, width), bands, str(pixels_CHW.dtype), packing=how, **meaning)  # type: ignore[arg-type]
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
        assert (made.profile.get("compress") or "none") == {"auto": "deflate"}.get(how.compress, how.compress)
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


def test_an_overview_of_shares_has_their_mean(tmp_path: Path) -> None:
    shares_CHW = np.random.default_rng(1).random((2, 1024, 600), np.float32)
    shares_CHW[:, :100, :101] = np.nan
    how = Packing().of_shares("float32")
    write_map(tmp_path / "p.tif", shares_CHW, how, nodata=float("nan"), descriptions=["a", "b"])
    with rasterio.open(tmp_path / "p.tif") as made, rasterio.open(tmp_path / "p.tif", overview_level=0) as half:
        assert made.descriptions == ("a", "b")
        fours = shares_CHW.reshape(2, 512, 2, 300, 2).swapaxes(2, 3).reshape(2, 512, 300, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing
            np.testing.assert_allclose(half.read(), np.nanmean(fours, -1), rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "dtype", "compress"),
    [
        (Packing("cog", "zstd"), "float32", "zstd"),
        (Packing("cog", "auto"), "float32", "none"),
        (Packing("cog", "auto"), "uint8", "deflate"),
        (Packing("gtiff", "lzw"), "uint8", "lzw"),
    ],
)
def test_every_way_keeps_shares(tmp_path: Path, how: Packing, dtype: str, compress: str) -> None:
    """Each bit of them, by the fast levels of compression too, on any threads; and the compression of each kind."""
    shares_CHW = np.random.default_rng(4).random((4, 700, 600), np.float32) ** 8
    pixels_CHW = (shares_CHW * 254).astype(np.uint8) if dtype == "uint8" else shares_CHW
    write_map(tmp_path / "p.tif", pixels_CHW, how.of_shares(dtype), threads=1)
    by_one = (tmp_path / "p.tif").read_bytes()
    write_map(tmp_path / "p.tif", pixels_CHW, how.of_shares(dtype), threads=2)
    assert (tmp_path / "p.tif").read_bytes() == by_one
    with rasterio.open(tmp_path / "p.tif") as made:
        assert np.array_equal(made.read().view(np.uint8), pixels_CHW.view(np.uint8))
        assert (made.profile.get("compress") or "none") == compress
        assert ColorInterp.alpha not in made.colorinterp, "four bands are four classes"
    assert [path.name for path in tmp_path.iterdir()] == ["p.tif"]
    assert cog_validate(tmp_path / "p.tif", strict=True)[0] == (how.format == "cog")


def test_the_disk_that_is_asked_for_is_enough(tmp_path: Path) -> None:
    """Noise, which does not compress: the files on the disk while GDAL packs are never more."""
    random = np.random.default_rng(3)
    shares = Packing().of_shares("float32")
    for how, shape in [*((how, (1024, 1536)) for how in (*WAYS[::2], shares)), (Packing("cog", "none"), (60, 4000))]:
        dtype = "float32" if how is shares else "uint8"
        noise_CHW = random.integers(0, 255, (1, *shape)).astype(dtype)
        seen = []
        layout = lay_out(tmp_path / "n.tif", Info(*shape), 1, dtype, packing=how)
        write_boxes(layout, [Box.of_shape(shape)], noise_CHW)

        def measure(seen: list[int] = seen) -> None:
            seen.append(0)
            for path in tmp_path.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    seen[-1] += path.stat().st_size

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiff_files, "_LOOK_SECONDS", 0.002)
            pack_layout(layout, beat=measure)
        measure()
        layout.discard()
        asked = raster_output("--output", tmp_path / "n.tif", Info(*shape), 1, dtype, how).size
        assert max(seen) <= asked + 4096, how


def test_large_files_are_bigtiff() -> None:
    """By the bytes of their pixels, and room for what does not compress."""
    assert PLAIN.is_big(BlockBytes(4_000_000_001, 0))
    assert not PLAIN.is_big(BlockBytes(4_000_000_000, 0))
    assert Packing().is_big(block_bytes(54_800, 54_800, 1))
    assert not Packing().is_big(block_bytes(53_000, 53_000, 1))
    narrow = block_bytes(100, 5_000_000, 1)  # overviews of one row of blocks, as the raster: each half of the last
    assert narrow.overviews > 0.99 * narrow.plain
    assert Packing().is_big(narrow)
    assert not PLAIN.is_big(narrow)


@pytest.mark.parametrize("fails", ["copy", "kept", "disk"])
def test_a_packing_that_fails_leaves_the_older_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    (tmp_path / "map.tif").write_bytes(b"old")
    layout = lay_out(tmp_path / "map.tif", Info(40, 50), 1, "uint8", packing=Packing())
    write_boxes(layout, [Box.of_shape((40, 50))], classes_of(40, 50)[None])

    def broken(*_: object, **__: object) -> None:
        raise RasterioIOError("No space left on device")

    if fails == "copy":
        monkeypatch.setattr(tiff_files.rasterio.shutil, "copy", broken)
    elif fails == "kept":
        monkeypatch.setattr(tiff_files, "meaning", lambda dataset: {"CRS": id(dataset)})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = {"copy": "No space left", "kept": "not kept the CRS", "disk": r"cannot write .*map.tif: "}[fails]
    try:
        if fails == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))
        with pytest.raises(WriteError, match=words):
            pack_layout(layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "map.tif").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"map.tif", ".map.tif.part"}
