"""Training with an augmentation is training on the changed rasters as if they lay on the disk; a resumed run goes on
with the same. `test_runs.py` has it on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.law.cases import one_rank
from tests.law.runs import losses, run
from tests.small_files import write_raster
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.config.words import augmentation
from tiledseg.raster.places import View
from tiledseg.raster.samples.draws import Draw, Drawer, pixel_noise
from tiledseg.raster.samples.sampling import Sampler
from tiledseg.tile import main as cut

pytestmark = pytest.mark.usefixtures("without_plots")
SIZE, BANDS, IGNORED = 52, 3, 255
PLACES: list[Any] = ["reflect", "turn", {"translate": 7}]
VALUES: list[Any] = [{"brightness": 0.3}, {"contrast": 0.3}, {"noise": 0.2}, {"drop_bands": 0.3}]


def scene() -> tuple[NDArray, NDArray]:
    random = np.random.default_rng(2)
    labels_HW = (np.add.outer(np.arange(SIZE) // 9, np.arange(SIZE) // 7) % 3).astype(np.uint8)
    image_CHW = random.normal(size=(BANDS, SIZE, SIZE)) + labels_HW
    image_CHW[:, 30:34, 5:20] = -99
    return image_CHW, labels_HW


def changed(image_CHW: NDArray, labels_HW: NDArray, draw: Draw) -> tuple[NDArray, NDArray]:
    """The whole raster by numpy: every pixel of it looked up, beyond the raster no data."""
    if draw.view is not None:
        rows, cols = places(draw.view)
        beyond_HW = ~((rows > -0.5) & (rows < SIZE - 0.5) & (cols > -0.5) & (cols < SIZE - 0.5))
        rows, cols = np.clip(rows, 0, SIZE - 1), np.clip(cols, 0, SIZE - 1)
        labels_HW = labels_HW[np.floor(rows + 0.5).astype(int), np.floor(cols + 0.5).astype(int)]
        nodata_HW = np.zeros((SIZE, SIZE), bool)
        total_CHW = np.zeros_like(image_CHW)
        for row_at, row_share in ((np.floor(rows), 1 - rows % 1), (np.ceil(rows), rows % 1)):
            for col_at, col_share in ((np.floor(cols), 1 - cols % 1), (np.ceil(cols), cols % 1)):
                corner_CHW = image_CHW[:, row_at.astype(int), col_at.astype(int)]
                share_HW = row_share * col_share
                total_CHW += corner_CHW * share_HW
                nodata_HW |= (corner_CHW[0] == -99) & (share_HW > 0)
        image_CHW = np.where(nodata_HW | beyond_HW, -99, total_CHW)
    if draw.photometry is not None:
        pixels_CHW = image_CHW * np.array(draw.photometry.factors)[:, None, None]
        pixels_CHW += np.array(draw.photometry.offsets)[:, None, None]
        noise_CHW = pixel_noise(draw.photometry.key, BANDS, np.arange(SIZE), np.arange(SIZE))
        pixels_CHW += noise_CHW * np.float32(draw.photometry.noise)
        pixels_CHW[~np.array(draw.photometry.kept)] = 0
        image_CHW = np.where(image_CHW[0] == -99, -99, pixels_CHW)
    return image_CHW, labels_HW


def places(view: View) -> NDArray:
    """Row and column in the raster of each pixel of the changed one."""
    return np.stack(view.to_raster @ np.indices((SIZE, SIZE)).astype(float))


def square(folder: Path, name: str, augment: list[Any], **train: Any) -> Config:
    return Config(
        data=DataConfig([str(folder / "image.tif")], [str(folder / "labels.tif")], classes=3, normalize=False),
        tiling=TilingConfig(grid=3),
        model=ModelConfig(levels=3, base_channels=4, dropout=0.2),
        optimizer=OptimizerConfig(lr=0.01),
        train=TrainConfig(**{"precision": "fp64", "augment": augment, **train}),
        run=RunConfig(output=str(folder / name), verbosity=0),
    )


def write(folder: Path, image_CHW: NDArray, labels_HW: NDArray) -> None:
    folder.mkdir(exist_ok=True)
    write_raster(folder / "image.tif", image_CHW, nodata=-99.0)
    write_raster(folder / "labels.tif", labels_HW[None].astype(np.uint8))


@pytest.mark.parametrize(
    ("augment", "seed", "bound"),
    [
        (PLACES, 0, 0),
        ([*PLACES, *VALUES], 1, 0),
        (["turn", {"scale": [0.6, 0.9]}, *VALUES], 5, 1e-12),
        (["turn", {"scale": [0.8, 1.1]}, {"rotate": 30}, *VALUES], 5, 1e-12),
    ],
)
def test_it_is_training_on_the_changed_raster(augment: list[Any], seed: int, bound: float, tmp_path: Path) -> None:
    """To the last bit, but where pixels are interpolated in another order of additions."""
    image_CHW, labels_HW = scene()
    write(tmp_path, image_CHW, labels_HW)
    found = losses(run(square(tmp_path, "augmented", augment, seed=seed), one_rank()))
    draw = Drawer(augmentation(augment), ((SIZE, SIZE),), BANDS).draw(f"tiledseg.augmentation {seed} 0 0", 0)
    assert draw is not None
    disk = tmp_path / "disk"
    write(disk, *changed(image_CHW, labels_HW, draw))
    expected = losses(run(square(disk, "plain", [], seed=seed), one_rank()))
    assert found == pytest.approx(expected, rel=bound, abs=0)
    assert found != losses(run(square(tmp_path, "unchanged", [], seed=seed), one_rank()))


def test_an_oblong_image_is_turned_with_its_grid(tmp_path: Path) -> None:
    """A quarter turn makes rows of columns: the loss is that of the turned file, cut into 3 x 2 tiles, not 2 x 3."""
    image_CHW, labels_HW = scene()
    image_CHW, labels_HW = image_CHW[:, :36], labels_HW[:36]
    write(tmp_path, image_CHW, labels_HW)
    expected, turns = [], []
    for epoch in range(4):
        draw = Drawer(augmentation(["turn"]), ((36, SIZE),), BANDS).draw(f"tiledseg.augmentation 0 {epoch} 0", 0)
        quarters = 0 if draw is None or draw.view is None else quarters_of(draw.view)
        disk = tmp_path / f"disk-{epoch}"
        write(disk, np.rot90(image_CHW, quarters, (1, 2)), np.rot90(labels_HW, quarters))
        expected.append(still(disk, "plain", [], [2, 3] if quarters % 2 == 0 else [3, 2]))
        turns.append(quarters % 2)
    assert set(turns) == {0, 1}, "some are turned"
    found = still(tmp_path, "augmented", ["turn"], [2, 3], epochs=4)
    assert found == [one for own in expected for one in own]


def quarters_of(view: View) -> int:
    """How often it is turned counter-clockwise, by where its first pixel lies."""
    a, b, _, d, e, _ = view.to_raster[:6]
    return [(1, 1), (1, -1), (-1, -1), (-1, 1)].index((a + b, d + e))


def still(folder: Path, name: str, augment: list[Any], grid: list[int], **train: Any) -> list[float]:
    """Losses of a run whose weights stay as they are, without dropout."""
    config = square(folder, name, augment, **train)
    config = replace(config, model=replace(config.model, dropout=0.0), tiling=TilingConfig(grid=grid))
    return losses(run(replace(config, optimizer=OptimizerConfig(name="sgd", lr=1e-300)), one_rank()))


def test_each_tile_is_one_of_its_own_changed_raster(tmp_path: Path) -> None:
    """With `augment_each: tile`: the loss of a tile is that of the same tile of a raster changed by its draw."""
    image_CHW, labels_HW = scene()
    write(tmp_path, image_CHW, labels_HW)
    augment = [*PLACES, *VALUES]

    def still(config: Config) -> list[float]:
        """Losses of a run whose weights stay as they are."""
        optimizer = OptimizerConfig(name="sgd", lr=1e-300)
        return losses(run(replace(config, optimizer=optimizer, tiling=TilingConfig(grid=2)), one_rank()))

    found = still(square(tmp_path, "own", augment, augment_each="tile", tiles_per_step=1))
    drawer = Drawer(augmentation(augment), ((SIZE, SIZE),), BANDS)
    expected = []
    for step, ((_, tile, _),) in enumerate(Sampler((4,), 0, 1).steps(0)):
        disk = tmp_path / f"disk-{tile}"
        draw = drawer.draw(f"tiledseg.augmentation 0 0 0 {tile}", 0)
        assert draw is not None
        write(disk, *changed(image_CHW, labels_HW, draw))
        expected.append(still(square(disk, "plain", [], tiles_per_step=1))[step])
    assert found == expected


def test_a_tile_store_is_seen_as_its_raster_is(tmp_path: Path) -> None:
    """A changed raster's tiles lie across those that were cut; and so do windows."""
    write(tmp_path, *scene())
    store, words = str(tmp_path / "tiles.h5"), ["--grid", "3", "--levels", "3", "--output"]
    images = ["--images", str(tmp_path / "image.tif"), "--labels", str(tmp_path / "labels.tif")]
    assert cut([*images, *words, store]) == 0
    windows = {"sampling": "windows", "window": 20, "windows_per_step": 4}
    for name, keys in (("tiles", {}), ("windows", windows)):
        config = square(tmp_path, name, [*PLACES, {"scale": [0.9, 1.2]}, *VALUES], **keys)
        stored = replace(config, data=replace(config.data, images=[store], labels=[]))
        stored.run = RunConfig(output=str(tmp_path / f"{name}-stored"), verbosity=0)
        assert losses(run(stored, one_rank())) == losses(run(config, one_rank()))
