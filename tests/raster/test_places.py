"""Views against numpy's flips and turns and scipy's interpolation; warped rasters against rasterio's exact warp; values
changed as written by hand, with noise that is normal, of its place, and the same in every box."""

import itertools
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from affine import Affine
from numpy.typing import NDArray
from rasterio.warp import Resampling, reproject
from scipy import stats
from scipy.ndimage import map_coordinates

from tests.small_files import UTM, write_raster
from tiledseg.config.words import Augmentation
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap, read_labels
from tiledseg.raster.labels.pair_reading import PairReading
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.places import View, view_reader
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.draws import Drawer, Photometry, draw_view, pixel_noise

H, W = 23, 17


class ValidReader(RasterReader):
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
    """The whole of a reader; boxes of it, which overlap, must be parts of that."""
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
    view = draw_view(Augmentation(reflect=(True, True), turn=90, translate=4), str(seed), (H, H))
    found_CHW, found_HW = every_box(view_reader(ValidReader(pixels_CHW, valid_HW), view), (H, H))
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
    half = [draw_view(Augmentation(reflect=(False, True), turn=180), str(seed), (H, W)) for seed in range(20)]
    assert {(view.shape, view.is_transposed, view.on_pixels) for view in half} == {((H, W), False, True)}


RESIZED = Affine(1.25, 0, 2.3, 0, -1.25, W - 1.1)
VIEWS = {
    "smaller": (View((H, W), Affine(2, 0, 2.3, 0, -2, W - 1.1)), "uint8"),
    "larger": (View((H, W), Affine(0.8, 0, 0.25, 0, 0.5, 0)), "float32"),
    "rotated": (View((H, W), RESIZED).rotated(30.0, 9.2, 6.4), "uint8"),
    "turned": (View((W, H), RESIZED @ Affine(0, 1, 0, 1, 0, 0)).rotated(-77.0, 9.2, 6.4), "float64"),
    "half a turn": (View((H, W), RESIZED).rotated(180.0, 9.2, 6.4), "uint8"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_pixels_between_pixels_are_scipys_and_classes_the_nearest(name: str) -> None:
    """A pixel is valid where all that it is made of is, and takes nothing of what is not."""
    view, dtype = VIEWS[name]
    pixels_CHW, valid_HW = raster(dtype)
    if dtype.startswith("float"):
        pixels_CHW[:, ~valid_HW] = np.nan
    a, b, c, d, e, f = view.to_raster[:6]
    rows_HW, cols_HW = np.indices(view.shape).astype(float)
    at = np.stack([a * rows_HW + b * cols_HW + c, d * rows_HW + e * cols_HW + f])
    inside_HW = (at[0] >= -0.5) & (at[0] < H - 0.5) & (at[1] >= -0.5) & (at[1] < W - 0.5)
    last = np.array([H - 1, W - 1])[:, None, None]
    clipped = np.clip(at, 0, last)
    whole_HW = map_coordinates((~valid_HW).astype(float), clipped, order=1) < 1e-12
    zeroed_CHW = np.where(valid_HW, pixels_CHW, 0).astype(float)
    expected_CHW = np.array([map_coordinates(band_HW, clipped, order=1) for band_HW in zeroed_CHW])
    reader = view_reader(ValidReader(pixels_CHW, valid_HW), view)
    found_CHW, found_HW = every_box(reader, view.shape)
    assert 0.1 < found_HW.mean() < 0.9
    np.testing.assert_array_equal(found_HW, inside_HW & whole_HW)
    assert reader.info.dtype == str(found_CHW.dtype) == {"uint8": "float32"}.get(dtype, dtype)
    np.testing.assert_allclose(found_CHW[:, found_HW], expected_CHW[:, found_HW], rtol=2e-5)
    assert np.isfinite(found_CHW).all()
    nearest = np.clip(np.floor(at + 0.5).astype(int), 0, last)
    classes_CHW, there_HW = every_box(view_reader(ValidReader(pixels_CHW, valid_HW), view, classes=True), view.shape)
    np.testing.assert_array_equal(there_HW, inside_HW & valid_HW[tuple(nearest)])
    np.testing.assert_array_equal(classes_CHW[:, there_HW], pixels_CHW[:, *nearest][:, there_HW])


def test_a_view_finds_the_places_that_it_shows_and_its_windows_show_the_same() -> None:
    asked = Augmentation(reflect=(True, True), turn=90, translate=4, scale=(0.7, 1.4), rotate=180)
    view = View((H, W)).rotated(90.0, 9.0, 6.0)  # about its point, counter-clockwise as seen, rows running down
    assert [view.to_raster @ (9.0, col) for col in (6.0, 7.0)] == [pytest.approx((9, 6)), pytest.approx((8, 6))]
    for seed in range(20):
        view = draw_view(asked, str(seed), (H, W))
        rows_HW, cols_HW = view.places(Box.of_shape(view.shape))
        for row, col in ((0, 0), (3, 11), (view.shape[0] - 1, view.shape[1] - 1)):
            assert view.find(rows_HW[row, col], cols_HW[row, col]) == pytest.approx((row, col), abs=1e-9)
        part = view.window(3, 2, (5, 7)).places(Box.of_shape((5, 7)))
        np.testing.assert_allclose(part, np.stack([rows_HW, cols_HW])[:, 3:8, 2:9], atol=1e-9)


def test_angles_are_drawn_evenly_either_way_and_change_no_other_draw() -> None:
    plain, rotated = Augmentation(reflect=(True, True)), Augmentation(reflect=(True, True), rotate=30)
    pairs = [[draw_view(asked, str(seed), (H, W)) for asked in (plain, rotated)] for seed in range(400)]
    turns = [~before.to_raster @ after.to_raster for before, after in pairs]
    counts, _ = np.histogram([np.degrees(np.arctan2(turn.d, turn.a)) for turn in turns], np.linspace(-30, 30, 7))
    assert sum(counts) == 400
    assert min(counts) > 40


SHAPE = 90, 110
PLACE = Affine(0.5, 0, 500000.1, 0, -0.5, 3760000.2)
WEST, EAST = (Affine(0.001, 0, degrees, 0, -0.001, 50.1) for degrees in (179.9, -170.1))
GRIDS: dict[str, Any] = {  # of labels; of an image; centres so near an edge that the last digit decides
    "coarser": ((UTM, Affine(0.7, 0, 499990.3, 0, -0.7, 3760003.1), (80, 120)), (UTM, PLACE), 2),
    "turned": ((UTM, Affine(0.4, 0.1, 499995, 0.1, -0.4, 3760001), (120, 130)), (UTM, PLACE), 2),
    "degrees": (("EPSG:4326", Affine(7e-6, 0, -117.00002, 0, -6e-6, 33.980537), (70, 80)), (UTM, PLACE), 2),
    "180 degrees": (("EPSG:4326", WEST, (200, 400)), ("EPSG:32601", Affine(30, 0, 283500, 0, -30, 5545000)), 15),
    "a turn away": (("EPSG:4326", EAST, (200, 400)), ("EPSG:4326", Affine(0.001, 0, 189.95, 0, -0.001, 50.0)), 15),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_each_label_is_the_one_that_holds_its_centre(tmp_path: Path, grid: str) -> None:
    (crs, place, shape), (image_crs, image_place), few = GRIDS[grid]
    raw_HW = np.random.default_rng(1).integers(0, 4, shape).astype(np.uint8)
    write_raster(tmp_path / "labels.tif", raw_HW[None], crs=crs, transform=place)
    write_raster(tmp_path / "image.tif", np.ones((1, *SHAPE), np.uint8), crs=image_crs, transform=image_place)
    label_map = LabelMap.from_config(4)
    with open_raster(str(tmp_path / "image.tif")) as image:
        info = image.info
    with pytest.raises(RasterError, match=r"differ in .*data\.warp true"):
        PairReading(label_map).open_labels(str(tmp_path / "labels.tif"), info)
    wanted_HW = np.full(SHAPE, 255, np.uint8)
    grids = {"src_crs": crs, "dst_crs": image_crs, "src_transform": place, "dst_transform": image_place}
    reproject(raw_HW, wanted_HW, **grids, resampling=Resampling.nearest, init_dest_nodata=False, tolerance=0)
    with PairReading(label_map, warp=True).open_labels(str(tmp_path / "labels.tif"), info) as labels:
        whole_HW = read_labels(labels, label_map, Box.of_shape(SHAPE))
        for box in Box.of_shape(SHAPE).blocks(37, 41):
            np.testing.assert_array_equal(read_labels(labels, label_map, box), whole_HW[box.slices])
    assert np.count_nonzero(whole_HW != wanted_HW) <= few
    assert len(np.unique(whole_HW)) >= 4
    with pytest.raises(RasterError, match=r"image\.tif has no CRS"):
        PairReading(label_map, warp=True).open_labels(str(tmp_path / "labels.tif"), replace(info, crs=None))


RASTER = (40, 50)
ALL_VALID = np.ones(RASTER, np.bool_)


@pytest.mark.parametrize("bands", [1, 4, 5])
def test_a_pixel_has_the_same_noise_in_every_box(bands: int) -> None:
    changes = Photometry((1.0,) * bands, (0.0,) * bands, (True,) * bands, noise=0.5, key=2**63 + 12345)
    whole_CHW = np.zeros((bands, *RASTER), np.float32)
    changes.apply(whole_CHW, ALL_VALID, Box.of_shape(RASTER), RASTER)
    for row, col in ((Interval(7, 31), Interval(3, 50)), (Interval(39, 40), Interval(0, 1))):
        part_CHW = np.zeros((bands, row.size, col.size), np.float32)
        changes.apply(part_CHW, np.ones(part_CHW.shape[1:], np.bool_), Box(row, col), RASTER)
        np.testing.assert_array_equal(part_CHW, whole_CHW[:, row.slice, col.slice])
    beyond_CHW = np.zeros((bands, 46, 53), np.float32)
    changes.apply(beyond_CHW, np.ones((46, 53), np.bool_), Box(Interval(-2, 44), Interval(0, 53)), RASTER)
    mirrored_CHW = np.pad(whole_CHW, ((0, 0), (2, 4), (0, 3)), mode="symmetric")
    np.testing.assert_array_equal(beyond_CHW, mirrored_CHW)


def test_noise_is_normal_and_no_two_bands_rows_columns_or_keys_have_the_same() -> None:
    positions = np.arange(512)
    noise_CHW = pixel_noise(99, 3, positions, positions).astype(np.float64)
    for band_HW in noise_CHW:
        assert abs(band_HW.mean()) < 4 / 512
        assert abs(band_HW.std() - 1) < 4 / 512
        assert stats.kstest(band_HW.ravel(), "norm").statistic < 4e-3
    other_CHW = pixel_noise(100, 3, positions, positions)
    pairs = [(noise_CHW[0], noise_CHW[1]), (noise_CHW[1], noise_CHW[2]), (noise_CHW[0], other_CHW[0])]
    pairs += [(noise_CHW[0, 1:], noise_CHW[0, :-1]), (noise_CHW[0, :, 1:], noise_CHW[0, :, :-1])]
    pairs += [(noise_CHW[0], noise_CHW[0].T)]
    for one_HW, other_HW in pairs:
        assert abs(np.corrcoef(one_HW.ravel(), other_HW.ravel())[0, 1]) < 1e-2


def test_noise_needs_little_memory_beside_itself() -> None:
    positions = np.arange(1024)
    pixel_noise(99, 2, positions, positions)
    tracemalloc.start()
    noise_CHW = pixel_noise(99, 3, positions, positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * noise_CHW.nbytes


def test_draws_lie_in_what_was_asked_for_and_one_band_stays() -> None:
    asked = Augmentation(brightness=0.25, contrast=0.5, noise=0.1, drop_bands=0.9)
    drawn = [Drawer(asked, (RASTER,), 4).draw(str(seed), 0) for seed in range(400)]
    draws = [draw.photometry for draw in drawn if draw and draw.photometry]
    offsets, factors = (np.array([getattr(draw, name) for draw in draws]) for name in ("offsets", "factors"))
    for values, low, high in ((offsets, -0.25, 0.25), (factors, 0.5, 1.5)):
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high
        assert len(np.unique(values)) == values.size, "each band has its own"
    kept = np.array([draw.kept for draw in draws])
    assert kept.any(1).all()
    # Each stays with 0.1, or as the one of four that must where all four were drawn to be left out.
    assert kept.mean() == pytest.approx(0.1 + 0.9**4 / 4, abs=0.04)
    assert len({draw.key for draw in draws}) == 400
    drawer = Drawer(Augmentation(reflect=(True, True), translate=9, brightness=1.0), (RASTER, RASTER), 2)
    assert drawer.draw("image 0", 0) == drawer.draw("image 0", 1) != drawer.draw("image 1", 0), "by the words alone"
