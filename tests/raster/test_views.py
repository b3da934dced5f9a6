"""A view's pixels against numpy's own flips, turns and slices, and scipy's interpolation, in every box of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from tiledseg.augmentation import Augmentation
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.draws import draw_view
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.views import Line, View, ViewReader, whole

H, W = 23, 17


class MaskedReader(RasterReader):
    """Pixels with a mask, in memory."""

    def __init__(self, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> None:
        self._pixels_CHW, self._valid_HW = pixels_CHW, valid_HW
        bands, height, width = pixels_CHW.shape
        self.info = RasterInfo("memory", height, width, bands, str(pixels_CHW.dtype))

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return self._pixels_CHW[:, *box.slices].copy(), self._valid_HW[box.slices].copy()

    def release(self) -> None: ...

    def close(self) -> None: ...


def raster(dtype: str = "uint8", shape: tuple[int, int] = (H, W)) -> tuple[NDArray, NDArray[np.bool_]]:
    random = np.random.default_rng(1)
    return random.integers(1, 255, (2, *shape)).astype(dtype), random.random(shape) > 0.1


def every_box(reader: RasterReader, shape: tuple[int, int]) -> tuple[NDArray, NDArray[np.bool_]]:
    """The whole of a reader, put together of boxes that overlap, each of which must be a part of it."""
    pixels_CHW, valid_HW = reader.read(Box.of_shape(shape))
    for top, left, side in itertools.product((0, 5, shape[0] - 6), (0, 3, shape[1] - 6), (1, 6)):
        box = Box(Interval(top, top + side), Interval(left, left + side))
        part_CHW, part_HW = reader.read(box)
        np.testing.assert_array_equal(part_CHW, pixels_CHW[:, *box.slices])
        np.testing.assert_array_equal(part_HW, valid_HW[box.slices])
        assert part_CHW.flags.c_contiguous
    return pixels_CHW, valid_HW


@pytest.mark.parametrize("seed", range(12))
def test_reflections_turns_and_moves_are_those_of_numpy(seed: int) -> None:
    pixels_CHW, valid_HW = raster(shape=(H, H))
    asked = Augmentation(reflect=(True, True), turn=90, translate=4)
    view = draw_view(asked, str(seed), (H, H))
    found_CHW, found_HW = every_box(ViewReader(MaskedReader(pixels_CHW, valid_HW), view), (H, H))
    matches = []
    for flip_rows, flip_cols, quarters in itertools.product((False, True), (False, True), range(4)):
        for down, right in itertools.product(range(-4, 5), range(-4, 5)):
            layers_CHW = np.concatenate([pixels_CHW, valid_HW[None]])
            layers_CHW = layers_CHW[:, :: -1 if flip_rows else 1, :: -1 if flip_cols else 1]
            layers_CHW = np.rot90(layers_CHW, quarters, (1, 2))
            around_CHW = np.pad(layers_CHW, ((0, 0), (4, 4), (4, 4)))  # beyond the raster: 0, and not valid
            moved_CHW = around_CHW[:, 4 + down : 4 + down + H, 4 + right : 4 + right + H]
            if np.array_equal(found_HW, moved_CHW[-1] > 0) and np.array_equal(found_CHW, moved_CHW[:-1]):
                matches.append((flip_rows, flip_cols, quarters, down, right))
    assert len({match[3:] for match in matches}) == 1, "one move, and the two ways to say one turn with reflections"
    assert len(matches) == 2


def test_all_eight_ways_to_lay_a_square_are_drawn_and_each_about_as_often() -> None:
    asked = Augmentation(reflect=(True, True), turn=90)
    views = [draw_view(asked, str(seed), (8, 8)) for seed in range(800)]
    counts = [views.count(view) for view in set(views)]
    assert len(counts) == 8
    assert min(counts) > 70


def test_half_turns_and_reflections_keep_the_shape_of_any_raster() -> None:
    for seed in range(20):
        view = draw_view(Augmentation(reflect=(False, True), turn=180), str(seed), (H, W))
        assert (view.shape, view.transposed, view.on_pixels) == ((H, W), False, True)


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
@pytest.mark.parametrize("factor", [0.5, 0.83, 1.3, 2.0])
def test_resizing_interpolates_as_scipy_does_and_takes_the_nearest_class(factor: float, dtype: str) -> None:
    pixels_CHW, _ = raster(dtype)
    valid_HW = np.ones((H, W), np.bool_)
    view = View((H, W), Line(2.3, 1 / factor), Line(W - 1.1, -1 / factor))
    reader = ViewReader(MaskedReader(pixels_CHW, valid_HW), view)
    found_CHW, found_HW = every_box(reader, (H, W))
    rows, cols = 2.3 + np.arange(H) / factor, W - 1.1 - np.arange(W) / factor
    inside_HW = (rows < H - 0.5)[:, None] & ((cols >= -0.5) & (cols < W - 0.5))
    at = np.meshgrid(rows, cols, indexing="ij")
    expected_CHW = [map_coordinates(band_HW.astype(float), at, order=1, mode="nearest") for band_HW in pixels_CHW]
    np.testing.assert_array_equal(found_HW, inside_HW)
    assert reader.info.dtype == str(found_CHW.dtype) == {"uint8": "float32"}.get(dtype, dtype)
    np.testing.assert_allclose(found_CHW[:, found_HW], np.array(expected_CHW)[:, found_HW], rtol=2e-5)
    classes_CHW, there_HW = every_box(ViewReader(MaskedReader(pixels_CHW, valid_HW), view, classes=True), (H, W))
    nearest_CHW = [map_coordinates(band_HW, np.round(at), order=0, mode="nearest") for band_HW in pixels_CHW]
    np.testing.assert_array_equal(there_HW, inside_HW)
    np.testing.assert_array_equal(classes_CHW[:, there_HW], np.array(nearest_CHW)[:, there_HW])


def test_a_resized_pixel_is_valid_where_all_that_it_is_made_of_is_and_takes_nothing_of_what_is_not() -> None:
    pixels_CHW, valid_HW = raster("float32")
    pixels_CHW[:, ~valid_HW] = np.nan
    view = View((H, W), Line(0.25, 0.8), Line(0.0, 0.5))
    found_CHW, found_HW = every_box(ViewReader(MaskedReader(pixels_CHW, valid_HW), view), (H, W))
    for row, col in itertools.product(range(H), range(W)):
        ends = [int(np.floor(0.25 + 0.8 * row)), int(np.floor(0.5 * col))]
        pairs = [(end, end + (share % 1 > 0)) for end, share in zip(ends, (0.25 + 0.8 * row, 0.5 * col), strict=True)]
        assert found_HW[row, col] == all(valid_HW[r, c] for r, c in itertools.product(*pairs))
    assert np.isfinite(found_CHW).all()


def test_the_view_that_changes_nothing_is_known() -> None:
    assert whole((3, 4)).is_whole
    assert not View((3, 4), Line(0, 1), Line(3, -1)).is_whole
