from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tiledseg.geometry.box import Box, Interval
from tiledseg.synthetic.land import IGNORED
from tiledseg.synthetic.scene import NODATA, Scene

HUGE = (10**6, 10**6)


@pytest.mark.parametrize(
    ("seed", "size", "bands", "rows", "cols", "digest"),
    [
        (0, (512, 512), 4, (0, 512), (0, 512), "e31d4d434c9c7f05"),
        (7, (131, 257), 1, (0, 131), (0, 257), "df92f1ed03a5a179"),
        (4194303, HUGE, 4, (700000, 700256), (800000, 800300), "a525157885c28a73"),
        (11, (1, 1), 4, (0, 1), (0, 1), "13a0de9c69dab9d8"),
    ],
)
def test_a_seed_gives_the_bytes_that_it_always_gave(
    seed: int, size: tuple[int, int], bands: int, rows: tuple[int, int], cols: tuple[int, int], digest: str
) -> None:
    image, classes = Scene(seed, size, bands).render(Box(Interval(*rows), Interval(*cols)))
    assert hashlib.sha256(image.tobytes() + classes.tobytes()).hexdigest()[:16] == digest


def test_any_window_shows_the_same_scene() -> None:
    """The law: windows of any size, in any order, agree to the byte."""
    whole = Box(Interval(900, 1300), Interval(200, 700))
    image, classes = Scene(5, HUGE).render(whole)
    for height, width in ((512, 512), (133, 211)):
        scene = Scene(5, HUGE)
        for box in reversed(list(whole.blocks(height, width))):
            part_CHW, part_HW = scene.render(box)
            rows, cols = box.relative_to(whole).slices
            np.testing.assert_array_equal(part_CHW, image[:, rows, cols])
            np.testing.assert_array_equal(part_HW, classes[rows, cols])


@pytest.mark.parametrize("seed", range(2))
def test_a_small_scene_holds_every_class(seed: int) -> None:
    _, classes = Scene(seed, (512, 512)).render(Box.of_shape((512, 512)))
    share = np.bincount(classes.ravel(), minlength=256) / classes.size
    assert (share[:5] > 0.005).all(), share[:5]
    assert share[:5].sum() + share[IGNORED] == pytest.approx(1)


def test_nodata_corner() -> None:
    size = (300, 400)
    image, classes = Scene(3, size).render(Box.of_shape(size))
    outside = classes == IGNORED
    assert outside[-1, -1]
    assert not outside[0, 0]
    assert not outside[-1, 0]
    assert 0.005 < outside.mean() < 0.03
    assert (image[:, outside] == NODATA).all()
    assert (image[:, ~outside] != NODATA).all()


@pytest.mark.parametrize("bands", [1, 3])
def test_fewer_bands_show_the_same_scene(bands: int) -> None:
    box = Box.of_shape((200, 200))
    full, classes = Scene(1, (200, 200)).render(box)
    image, same = Scene(1, (200, 200), bands).render(box)
    np.testing.assert_array_equal(classes, same)
    if bands == 3:
        np.testing.assert_array_equal(image, full[:3])
    else:
        valid = classes != IGNORED
        assert image.shape == (1, 200, 200)
        assert np.corrcoef(image[0][valid], full.mean(axis=0)[valid])[0, 1] > 0.9
