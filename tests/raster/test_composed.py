"""Images made of several rasters have the pixels and the validity of the one file that holds the same."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from tests.array_scenes import CRS, TRANSFORM, write
from tests.small_files import PLACE, write_raster
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.composed import (
    BANDS,
    MOSAIC,
    TIMES,
    VALID,
    Composed,
    Raster,
    files_of,
    label_of,
    open_composed,
    parse_raster,
)
from tiledseg.raster.mirrored_reader import PAUSES, RasterReader
from tiledseg.raster.reader import identify, open_raster, written_since

HEIGHT, WIDTH = 37, 45
BOXES = (
    Box(Interval(0, HEIGHT), Interval(0, WIDTH)),
    Box(Interval(-7, 20), Interval(13, 60)),  # mirrored at three borders
    Box(Interval(18, 19), Interval(20, 21)),
)
CUTS = Interval(0, 18), Interval(18, HEIGHT), Interval(0, 21), Interval(21, WIDTH)
PIECES = [Box(rows, cols) for rows in CUTS[:2] for cols in CUTS[2:]]


def scene(dtype: str, bands: int = 4) -> NDArray:
    """Noise, in which 0 is frequent: in some places of all bands."""
    draw = np.random.default_rng(3)
    pixels_CHW = draw.integers(0, 4, (bands, HEIGHT, WIDTH)).astype(dtype)
    pixels_CHW[:, 3:9, 20:30] = 0
    return pixels_CHW


def piece(path: Path, pixels_CHW: NDArray, box: Box, **options: Any) -> str:
    transform = TRANSFORM @ rasterio.Affine.translation(box.col.start, box.row.start)
    return write_raster(path, pixels_CHW[:, *box.slices], crs=CRS, transform=transform, **options)


def mosaic(folder: Path, pixels_CHW: NDArray, order: tuple[int, ...] = (2, 0, 3, 1), **options: Any) -> Composed:
    paths = [piece(folder / f"piece{at}.tif", pixels_CHW, PIECES[at], **options) for at in order]
    return Composed("mosaic", MOSAIC, tuple(paths))


def stack(folder: Path, pixels_CHW: NDArray, form: str = "tif", nodata: float | None = None) -> Composed:
    parts = enumerate(np.split(pixels_CHW, (1, 3)))
    return Composed("stack", BANDS, tuple(write(folder, form, part, f"b{at}", nodata) for at, part in parts))


def mosaic_of_stacks(folder: Path, pixels_CHW: NDArray, **options: Any) -> Composed:
    stacks = []
    for at, box in enumerate(PIECES):
        bands = [piece(folder / f"{at}-{k}.tif", band[None], box, **options) for k, band in enumerate(pixels_CHW)]
        stacks.append(Composed(f"stack {at}", BANDS, tuple(bands)))
    whole = Composed("whole", MOSAIC, tuple(stacks))
    assert parse_raster(str(whole)) == whole
    assert (label_of(str(whole)), label_of("a.tif"), len(files_of(whole))) == ("whole", "a.tif", 16)
    return whole


KINDS = {
    "stack": stack,
    "stack of Zarr": partial(stack, form="zarr3"),
    "stack of netCDF": partial(stack, form="nc4"),
    "mosaic": mosaic,
    "mosaic of stacks": mosaic_of_stacks,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "options"), [("uint8", {"nodata": 0}), ("int16", {"nodata": 0}), ("float32", {})])
def test_it_has_the_pixels_of_one_file(tmp_path: Path, kind: str, dtype: str, options: dict[str, Any]) -> None:
    pixels_CHW = scene(dtype)
    one, several = write(tmp_path, "tif", pixels_CHW, "plain", **options), KINDS[kind](tmp_path, pixels_CHW, **options)
    same = {"path": "", "files": (), "size": 0, "has_mask": True, "block_shape": (1, 1), "driver": ""}
    for how in ({}, {"bands": [4, 1, 3]}, {"nodata": 3.0}):
        with open_raster(one, **how) as plain, open_raster(str(several), **how) as composed:
            assert replace(composed.info, **same) == replace(plain.info, **same)
            for box in BOXES:
                (ours_CHW, ours_HW), (theirs_CHW, theirs_HW) = composed.read(box), plain.read(box)
                np.testing.assert_array_equal(ours_HW, theirs_HW)
                np.testing.assert_array_equal(ours_CHW, theirs_CHW)
                assert ours_CHW.dtype == theirs_CHW.dtype


def test_each_band_has_the_nodata_value_of_its_part(tmp_path: Path) -> None:
    pixels_CHW = scene("int16", 2)
    parts = [write_raster(tmp_path / f"{at}.tif", pixels_CHW[at : at + 1], nodata=at + 1) for at in range(2)]
    with open_raster(str(Composed("stack", BANDS, tuple(parts))), [2, 1]) as reader:
        _, valid_HW = reader.read(Box.of_shape((HEIGHT, WIDTH)))
    np.testing.assert_array_equal(valid_HW, (pixels_CHW[0] != 1) & (pixels_CHW[1] != 2))


def test_of_overlapping_pieces_the_first_valid_one_counts(tmp_path: Path) -> None:
    ones_CHW, twos_CHW = np.full((1, 4, 6), 1, np.uint8), np.full((1, 4, 6), 2, np.uint8)
    ones_CHW[0, :, 4] = 0
    first = piece(tmp_path / "a.tif", ones_CHW, Box.of_shape((4, 6)), nodata=0)
    place = {"crs": CRS, "transform": TRANSFORM @ rasterio.Affine.translation(3, 2)}
    second = write_raster(tmp_path / "b.tif", twos_CHW, nodata=0, **place)
    for order, middle in (((first, second), [1, 2, 1]), ((second, first), [2, 2, 2])):
        with open_raster(str(Composed("m", MOSAIC, order))) as reader:
            pixels_CHW, valid_HW = reader.read(Box.of_shape(reader.info.shape))
            assert reader.info.shape == (6, 9)
            assert reader.info.transform == TRANSFORM
        assert pixels_CHW[0, 3].tolist() == [1, 1, 1, *middle, 2, 2, 2]
        outside_HW = np.zeros((6, 9), bool)
        outside_HW[:2, 6:] = outside_HW[4:, :3] = True
        outside_HW[:2, 4] = True  # no data in the one piece there
        np.testing.assert_array_equal(valid_HW, ~outside_HW)
        assert not pixels_CHW[0, outside_HW].any()


@pytest.mark.parametrize("values", [(), (4.0, 7.0)])
@pytest.mark.parametrize("place", ["raster", "band", "coarse"])
def test_a_mask_says_which_pixels_are_valid(tmp_path: Path, values: tuple[float, ...], place: str) -> None:
    pixels_CHW = scene("uint8", 5)
    pixels_CHW[4] = np.random.default_rng(5).choice([0, 2, 4, 7], (HEIGHT, WIDTH))
    data = write_raster(tmp_path / "data.tif", pixels_CHW if place == "band" else pixels_CHW[:4], nodata=0)
    mask_HW, number = pixels_CHW[4], 5 if place == "band" else None
    if place == "coarse":  # of pixels of 3 x 3, as scene classifications are
        coarse_HW = mask_HW[1::3, 1::3]
        mask_HW = coarse_HW.repeat(3, 0).repeat(3, 1)[:HEIGHT, :WIDTH]
        mask = write_raster(tmp_path / "mask.tif", coarse_HW[None], transform=PLACE @ rasterio.Affine.scale(3))
        valid_rows = np.arange(HEIGHT)[:, None] < 3 * len(coarse_HW)
        mask_HW = np.where(valid_rows, np.pad(mask_HW, ((0, HEIGHT - len(mask_HW)), (0, 0))), 0)
    else:
        mask = write_raster(tmp_path / "mask.tif", mask_HW[None])
    plain = write_raster(tmp_path / "plain.tif", pixels_CHW[:4], nodata=0)
    masked = Composed("data.tif", VALID, (data,) if number else (data, mask), number, values)
    box = Box.of_shape((HEIGHT, WIDTH))
    for bands in (None, [3, 1]):
        with open_raster(plain, bands) as one, open_raster(str(masked), bands) as other:
            (ours_CHW, ours_HW), (theirs_CHW, theirs_HW) = other.read(box), one.read(box)
            assert (other.info.bands, other.info.band_numbers) == (one.info.bands, one.info.band_numbers)
        np.testing.assert_array_equal(ours_CHW, theirs_CHW)
        counts_HW = np.isin(mask_HW, values) if values else mask_HW != 0
        np.testing.assert_array_equal(ours_HW, theirs_HW & counts_HW)


def test_values_of_a_mask_are_compared_in_its_dtype(tmp_path: Path) -> None:
    pixels_CHW = scene("uint8")[:1]
    data = write_raster(tmp_path / "data.tif", pixels_CHW)
    mask = write_raster(tmp_path / "mask.tif", np.where(pixels_CHW == 2, 0.3, 0.7).astype("float32"))
    with open_raster(str(Composed("data.tif", VALID, (data, mask), None, (0.3, 9.0)))) as reader:
        _, valid_HW = reader.read(Box.of_shape((HEIGHT, WIDTH)))
    np.testing.assert_array_equal(valid_HW, pixels_CHW[0] == 2)


def test_a_mask_of_a_part_is_told_and_one_of_the_only_band_is_refused(tmp_path: Path) -> None:
    data = write_raster(tmp_path / "data.tif", scene("uint8")[:1])
    for name, size, shift, told in (("half", 20, 0, True), ("far", HEIGHT, 1e6, True), ("rim", HEIGHT - 1, 0, False)):
        place = PLACE @ rasterio.Affine.translation(shift, 0)
        mask = write_raster(tmp_path / f"{name}.tif", np.ones((1, size, WIDTH), "uint8"), transform=place)
        with open_raster(str(Composed(data, VALID, (data, mask)))) as reader:
            line = f"{data}: {mask} of data.valid covers only a part; pixels beyond it are not valid"
            assert reader.info.notes == ((line,) if told else ())
    with pytest.raises(RasterError, match=r"data.tif has no band but 1, its mask by data.valid"):
        open_raster(str(Composed(data, VALID, (data,), 1)))


def test_parts_that_do_not_fit_are_named_both(tmp_path: Path) -> None:
    pixels_CHW = scene("uint8")[:1]
    good = write_raster(tmp_path / "good.tif", pixels_CHW)
    half, twice = PLACE @ rasterio.Affine.translation(0.5, 0), PLACE @ rasterio.Affine.scale(2)
    others = {
        "coarse": (write_raster(tmp_path / "coarse.tif", pixels_CHW[:, ::2, ::2], transform=twice), "size|transform"),
        "moved": (write_raster(tmp_path / "moved.tif", pixels_CHW, transform=half), "500000, .*500000.25"),
        "zone": (write_raster(tmp_path / "zone.tif", pixels_CHW, crs="EPSG:32612"), "CRS: .*32611.*32612"),
        "wide": (write_raster(tmp_path / "wide.tif", pixels_CHW.astype("uint16")), "dtype: uint8 against uint16"),
    }
    for name, (path, words) in others.items():
        for kind in (BANDS, TIMES, MOSAIC):
            with pytest.raises(RasterError, match=words) as caught:
                open_raster(str(Composed("x", kind, (good, path))))
            assert "good.tif" in str(caught.value)
            assert f"{name}.tif" in str(caught.value)
    unplaced = write_raster(tmp_path / "bare.tif", pixels_CHW, crs=None, transform=None)
    with pytest.raises(RasterError, match=r"bare.tif has no CRS.*data.mosaic"):
        open_raster(str(Composed("x", MOSAIC, (good, unplaced))))
    four = write_raster(tmp_path / "four.tif", scene("uint8"))
    with pytest.raises(RasterError, match="with 4 bands"):
        open_raster(str(Composed("x", VALID, (good, four))))
    with pytest.raises(RasterError, match="differ in bands: 1 against 4"):
        open_raster(str(Composed("x", TIMES, (good, four))))
    with pytest.raises(RasterError, match=r"band 9.*bands 1 to 2"):
        open_raster(str(Composed("x", BANDS, (good, good))), [9])
    with pytest.raises(RasterError, match="cannot read the name"):
        open_raster("composed:[3]")


def test_a_broken_part_is_tried_as_often_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of readers do not multiply the tries."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    good = mosaic(tmp_path, scene("uint8"), compress="deflate")
    name = str(Composed("v", VALID, (Composed("s", BANDS, (good,)), good), 1))
    with open_raster(name) as reader:
        for path in tmp_path.glob("*.tif"):
            data = bytearray(path.read_bytes())
            data[-60:] = bytes(60)
            path.write_bytes(data)
        reader.release()
        with pytest.raises(RasterError, match=r"piece\d.tif.*tried 4 times"):
            reader.read(Box.of_shape(reader.info.shape))
    assert len(pauses) == len(PAUSES)


def test_a_change_of_a_part_changes_the_identity(tmp_path: Path) -> None:
    name = str(mosaic(tmp_path, scene("uint8")))
    with open_raster(name) as reader:
        beside = reader.info.beside
        assert {*files_of(parse_raster(name))} == {*reader.info.files}, "no output replaces one of them"
    before = identify(name, beside)
    assert not identify(name, beside).changed_since(before)
    assert written_since([before]) == ()
    assert identify(name, beside).holds_what(before)
    write_raster(tmp_path / "piece3.tif", scene("uint8")[:, :5, :5])
    assert identify(name, beside).changed_since(before)
    assert not identify(name, beside).holds_what(before)
    assert written_since([before]) == ("mosaic",)
    os.remove(tmp_path / "piece3.tif")
    assert identify(name, beside).changed_since(before)


def test_files_of_pieces_are_closed_after_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiledseg.raster.mirrored_reader.MOST_IDLE", 2)
    with open_raster(str(stack(tmp_path, scene("uint8")))) as other:
        other.read(PIECES[0])
        open_before = len(os.listdir("/proc/self/fd"))
        with open_raster(str(mosaic(tmp_path, scene("uint8")))) as reader:
            reader.read(Box.of_shape(reader.info.shape))
            assert len(os.listdir("/proc/self/fd")) == open_before, "those of the other raster are closed"
        assert len(os.listdir("/proc/self/fd")) == open_before - 2


def test_a_reader_that_is_dropped_or_replaced_keeps_no_file_open(tmp_path: Path) -> None:
    image, one = str(stack(tmp_path, scene("uint8"))), str(write_raster(tmp_path / "one.tif", scene("uint8")))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RasterError) as refused:
        open_raster(one, [5])
    assert len(os.listdir("/proc/self/fd")) == before, refused
    kept: list[RasterReader] = []

    def opener(part: Raster, bands: Sequence[int] | None, is_image: bool) -> RasterReader:
        kept.append(open_raster(str(part), bands))
        return kept[-1]

    masked = Composed("masked", VALID, (one, one), 1)
    for composed, bands in ((parse_raster(image), [1, 2]), (masked, None)):
        assert isinstance(composed, Composed)
        open_composed(composed, bands, opener).close()
        assert len(os.listdir("/proc/self/fd")) == before, composed
    reader = open_raster(one)
    reader.read(PIECES[0])
    del reader
    assert len(os.listdir("/proc/self/fd")) == before
