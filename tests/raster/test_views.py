"""A view's pixels against numpy's own flips, turns and slices, and scipy's interpolation, in every box of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from tiledseg.config.augmentation import Augmentation
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.draws import draw_view
from tiledseg.raster.samples.views import Line, Rotation, View, ViewReader, whole

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


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize(("factor", "dtype"), [(0.5, "uint8"), (0.83, "float64"), (1.3, "uint8")])
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


@pytest.mark.parametrize(
    ("degrees", "transposed", "dtype"), [(30.0, False, "uint8"), (-77.0, True, "float64"), (180.0, False, "uint8")]
)
def test_a_rotation_interpolates_as_scipy_does_and_takes_the_nearest_class(
    degrees: float, transposed: bool, dtype: str
) -> None:
    """Counter-clockwise as seen, rows running down; before it the raster is laid and resized as without it."""
    pixels_CHW, valid_HW = raster(dtype)
    angle = np.radians(degrees)
    lines = Line(2.3, 1 / 1.2), Line(W - 1.1, -1 / 1.2)
    shape = (W, H) if transposed else (H, W)
    view = View(shape, *lines, transposed, Rotation(np.cos(angle), np.sin(angle), 9.2, 6.4))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    positions = np.indices(shape).reshape(2, -1) - np.array([[9.2], [6.4]])
    rows_HW, cols_HW = (turn @ positions + np.array([[9.2], [6.4]])).reshape(2, *shape)
    rows_HW, cols_HW = (cols_HW, rows_HW) if transposed else (rows_HW, cols_HW)
    at = np.stack([lines[0].start + lines[0].step * rows_HW, lines[1].start + lines[1].step * cols_HW])
    inside_HW = (at[0] >= -0.5) & (at[0] < H - 0.5) & (at[1] >= -0.5) & (at[1] < W - 0.5)
    clipped = np.clip(at, 0, np.array([H - 1, W - 1])[:, None, None])
    whole_HW = map_coordinates((~valid_HW).astype(float), clipped, order=1) < 1e-12
    zeroed_CHW = np.where(valid_HW, pixels_CHW, 0).astype(float)
    expected_CHW = np.array([map_coordinates(band_HW, clipped, order=1) for band_HW in zeroed_CHW])
    reader = ViewReader(MaskedReader(pixels_CHW, valid_HW), view)
    found_CHW, found_HW = every_box(reader, shape)
    assert 0.2 < found_HW.mean() < 0.9
    np.testing.assert_array_equal(found_HW, inside_HW & whole_HW)
    assert reader.info.dtype == str(found_CHW.dtype) == {"uint8": "float32"}.get(dtype, dtype)
    np.testing.assert_allclose(found_CHW[:, found_HW], expected_CHW[:, found_HW], rtol=2e-5)
    nearest = np.clip(np.floor(at + 0.5).astype(int), 0, np.array([H - 1, W - 1])[:, None, None])
    classes_CHW, there_HW = every_box(ViewReader(MaskedReader(pixels_CHW, valid_HW), view, classes=True), shape)
    np.testing.assert_array_equal(there_HW, inside_HW & valid_HW[tuple(nearest)])
    np.testing.assert_array_equal(classes_CHW[:, there_HW], pixels_CHW[:, *nearest][:, there_HW])


def test_a_rotated_view_finds_the_places_that_it_shows_and_its_windows_show_the_same() -> None:
    asked = Augmentation(reflect=(True, True), turn=90, translate=4, scale=(0.7, 1.4), rotate=180)
    for seed in range(20):
        view = draw_view(asked, str(seed), (H, W))
        rows_HW, cols_HW = view.places(Box.of_shape(view.shape))
        for row, col in ((0, 0), (3, 11), (view.shape[0] - 1, view.shape[1] - 1)):
            assert view.find(rows_HW[row, col], cols_HW[row, col]) == pytest.approx((row, col), abs=1e-9)
        part = view.window(3, 2, (5, 7))
        np.testing.assert_allclose(part.places(Box.of_shape((5, 7)))[0], rows_HW[3:8, 2:9], atol=1e-9)
        np.testing.assert_allclose(part.places(Box.of_shape((5, 7)))[1], cols_HW[3:8, 2:9], atol=1e-9)


def test_angles_are_drawn_evenly_either_way_and_change_no_other_draw() -> None:
    plain, rotated = Augmentation(reflect=(True, True)), Augmentation(reflect=(True, True), rotate=30)
    views = [draw_view(rotated, str(seed), (H, W)) for seed in range(400)]
    rotations = [view.rotation for view in views if view.rotation is not None]
    degrees = np.degrees([np.arctan2(each.sin, each.cos) for each in rotations])
    counts, _ = np.histogram(degrees, np.linspace(-30, 30, 7))
    assert sum(counts) == 400
    assert min(counts) > 40
    assert [replace(view, rotation=None) for view in views] == [draw_view(plain, str(s), (H, W)) for s in range(400)]
    assert min(each.row for each in rotations) < 2
    assert max(each.row for each in rotations) > H - 3


@pytest.mark.parametrize(("rotate", "scale", "expected"), [(0, 1.0, 1.0), (45, 1.0, 2**0.5), (180, 0.5, 2 * 2**0.5)])
def test_how_far_a_pixel_reaches_along_rows_or_columns(rotate: float, scale: float, expected: float) -> None:
    assert Augmentation(rotate=rotate, scale=(scale, 1.0)).reach == pytest.approx(expected)
