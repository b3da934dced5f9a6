"""Values change as written by hand; noise is normal, of its place, and the same in every box."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tiledseg.config.words import Augmentation
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.samples.draws import Drawer, Photometry, pixel_noise

RASTER = (40, 50)
ALL_VALID = np.ones(RASTER, np.bool_)


def test_contrast_brightness_and_dropped_bands_by_hand() -> None:
    x_CHW = np.random.default_rng(0).normal(size=(3, *RASTER))
    valid_HW = np.random.default_rng(1).random(RASTER) > 0.2
    found_CHW = np.where(valid_HW, x_CHW, 0)
    Photometry((1.5, 1.0, 2.0), (0.0, -0.25, 1.0), (True, True, False)).apply(
        found_CHW, valid_HW, Box.of_shape(RASTER), RASTER
    )
    np.testing.assert_array_equal(found_CHW[0], np.where(valid_HW, x_CHW[0] * 1.5, 0))
    np.testing.assert_array_equal(found_CHW[1], np.where(valid_HW, x_CHW[1] - 0.25, 0))
    assert (found_CHW[2] == 0).all()


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
