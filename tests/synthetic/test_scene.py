"""The synthetic scene: the same bytes in any window, by any number of workers, in files that are whole or not there."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import rasterio

from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.reader import open_raster
from tiledseg.scene import main
from tiledseg.synthetic import scene
from tiledseg.synthetic.scene import BANDS, IGNORED, NODATA, Scene, write_scene

HUGE = (10**6, 10**6)
ENDS = (".tif", "-labels.tif", "-labels.tif.aux.xml", "-labels.qml")


@pytest.mark.parametrize(
    ("seed", "size", "bands", "rows", "cols", "digest"),
    [
        (7, (131, 257), 1, (0, 131), (0, 257), "3cff20f2668da393"),
        (4194303, HUGE, 4, (700000, 700256), (800000, 800300), "25e7f88c62467111"),
        (4194303, HUGE, 3, (700000, 700256), (800000, 800300), "b105de036c68795d"),
        (11, (1, 1), 4, (0, 1), (0, 1), "6ce7bb760f8d7000"),
    ],
)
def test_a_seed_gives_the_bytes_that_it_always_gave(
    seed: int, size: tuple[int, int], bands: int, rows: tuple[int, int], cols: tuple[int, int], digest: str
) -> None:
    image, classes = Scene(seed, size, bands).render(Box(Interval(*rows), Interval(*cols)))
    assert hashlib.sha256(image.tobytes() + classes.tobytes()).hexdigest()[:16] == digest


def test_any_window_shows_the_same_scene() -> None:
    """The law: windows of any size, in any order, agree to the byte."""
    whole = Box(Interval(900, 1100), Interval(200, 540))
    image, classes = Scene(5, HUGE).render(whole)
    for height, width in ((512, 512), (133, 211)):
        scene = Scene(5, HUGE)
        for box in reversed(list(whole.blocks(height, width))):
            part_CHW, part_HW = scene.render(box)
            rows, cols = box.relative_to(whole).slices
            np.testing.assert_array_equal(part_CHW, image[:, rows, cols])
            np.testing.assert_array_equal(part_HW, classes[rows, cols])


@pytest.mark.parametrize("seed", range(2))
def test_a_small_scene_holds_every_class_and_a_corner_without_data(seed: int) -> None:
    image, classes = Scene(seed, (512, 512)).render(Box.of_shape((512, 512)))
    share = np.bincount(classes.ravel(), minlength=256) / classes.size
    assert (share[:5] > 0.005).all(), share[:5]
    assert share[:5].sum() + share[IGNORED] == pytest.approx(1)
    outside = classes == IGNORED
    assert outside[-1, -1]
    assert not outside[-1, 0]
    assert 0.005 < outside.mean() < 0.03
    assert (image[:, outside] == NODATA).all()
    assert (image[:, ~outside] != NODATA).all()


def test_bytes_are_the_same_for_any_number_of_workers_and_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name, workers, window in (("a", "1", (512, 1536)), ("b", "2", (512, 512))):
        monkeypatch.setattr(scene, "WINDOW", window)
        paths = tmp_path / f"{name}.tif", tmp_path / f"{name}-labels.tif"
        files = ["--image", str(paths[0]), "--labels", str(paths[1])]
        assert main(["--size", "130", "700", "--seed", "3", "--workers", workers, *files]) == 0
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    expected = Scene(3, (130, 700)).render(Box.of_shape((130, 700)))
    with rasterio.open(tmp_path / "a.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), expected[0])
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}{end}" for name in "ab" for end in ENDS}


def test_files_hold_the_scene(tmp_path: Path) -> None:
    image, labels = tmp_path / "a.tif", tmp_path / "b.tif"
    size, bands = (100, 520), 1
    write_scene(image, labels, size, bands, seed=2)
    expected = Scene(2, size, bands).render(Box.of_shape(size))
    with rasterio.open(image) as dataset:
        np.testing.assert_array_equal(dataset.read(), expected[0])
        assert dataset.descriptions == BANDS[bands]
        assert dataset.nodata == 0
        assert dataset.crs.is_projected
        assert dataset.res == (0.5, 0.5)
        assert dataset.block_shapes[0] == (512, 512)
        grid = dataset.crs, dataset.transform
    with rasterio.open(labels) as dataset:
        np.testing.assert_array_equal(dataset.read(1), expected[1])
        assert dataset.nodata == 255
        assert (dataset.crs, dataset.transform) == grid
        assert dataset.colormap(1)[4][2] > dataset.colormap(1)[4][0]
        assert dataset.tags(1)["CLASS_3"] == "tree"
    with open_raster(str(image)) as reader:
        assert reader.info.bands == bands  # none of them taken for alpha
        np.testing.assert_array_equal(reader.read(Box.of_shape(size))[1], expected[1] != 255)


def test_existing_files_stay_until_both_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, labels = tmp_path / "a.tif", tmp_path / "b.tif"
    image.write_bytes(b"old")
    labels.write_bytes(b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scene.Scene, "render", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_scene(image, labels, (64, 64))
    assert image.read_bytes() == labels.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    write_scene(image, labels, (64, 64))
    assert len(image.read_bytes()) > 1000
