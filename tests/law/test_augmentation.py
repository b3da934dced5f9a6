"""Training with an augmentation is training on the changed rasters as if they lay on the disk. `test_runs.py` has it on
ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.law.cases import one_rank
from tests.law.runs import losses, run
from tests.law.shown import NODATA, shown
from tests.small_files import write_raster
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.config.words import augmentation
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.sampling import Sampler
from tiledseg.tile import main as cut

pytestmark = pytest.mark.usefixtures("without_plots")
H, W, BANDS = 36, 52, 3
PLACES: list[Any] = ["reflect", "turn", {"translate": 7}]
VALUES: list[Any] = [{"brightness": 0.3}, {"contrast": 0.3}, {"noise": 0.2}, {"drop_bands": 0.3}]


def scene(folder: Path) -> tuple[NDArray, NDArray]:
    labels_HW = (np.add.outer(np.arange(H) // 9, np.arange(W) // 7) % 3).astype(np.uint8)
    image_CHW = np.random.default_rng(2).normal(size=(BANDS, H, W)) + labels_HW
    image_CHW[:, 30:34, 5:20] = NODATA
    write(folder, image_CHW, labels_HW)
    return image_CHW, labels_HW


def write(folder: Path, image_CHW: NDArray, labels_HW: NDArray) -> None:
    folder.mkdir(exist_ok=True)
    write_raster(folder / "image.tif", image_CHW, nodata=float(NODATA))
    write_raster(folder / "labels.tif", labels_HW[None].astype(np.uint8))


def config(folder: Path, name: str, augment: list[Any], grid: Any, dropout: float = 0.0, **train: Any) -> Config:
    """A turned oblong image is another one to dropout."""
    return Config(
        data=DataConfig([str(folder / "image.tif")], [str(folder / "labels.tif")], classes=3, normalize=False),
        tiling=TilingConfig(grid=grid),
        model=ModelConfig(levels=3, base_channels=4, dropout=dropout),
        optimizer=OptimizerConfig(lr=0.01),
        train=TrainConfig(**{"precision": "fp64", "augment": augment, **train}),
        run=RunConfig(output=str(folder / name), verbosity=0),
    )


@pytest.mark.parametrize(
    ("augment", "seed", "bound"),
    [
        (PLACES, 0, 0),
        ([*PLACES, *VALUES], 4, 0),
        (["turn", {"scale": [0.6, 0.9]}, *VALUES], 5, 1e-12),
        (["turn", {"scale": [0.8, 1.1]}, {"rotate": 30}, *VALUES], 5, 1e-12),
    ],
)
def test_it_is_training_on_the_changed_raster(augment: list[Any], seed: int, bound: float, tmp_path: Path) -> None:
    """To the last bit, but where pixels are interpolated in another order of additions. A quarter turn turns the grid:
    the loss is that of the turned file, cut into 3 x 2 tiles, not 2 x 3."""
    image = scene(tmp_path)
    draw = Drawer(augmentation(augment), ((H, W),), BANDS).draw(f"tiledseg.augmentation {seed} 0 0", 0)
    assert draw is not None
    assert draw.view is not None
    is_turned, disk = draw.view.shape != (H, W), tmp_path / "disk"
    assert is_turned == (seed != 4)
    write(disk, *shown(*image, draw))
    keys = {"dropout": 0.0 if is_turned else 0.2, "seed": seed}
    found = losses(run(config(tmp_path, "augmented", augment, [2, 3], **keys), one_rank()))
    expected = losses(run(config(disk, "plain", [], [3, 2] if is_turned else [2, 3], **keys), one_rank()))
    assert found == pytest.approx(expected, rel=bound, abs=0)
    assert found != losses(run(config(tmp_path, "unchanged", [], [2, 3], **keys), one_rank()))


def test_each_tile_is_one_of_its_own_changed_raster(tmp_path: Path) -> None:
    """With `augment_each: tile`: the loss of a tile is that of the same tile of a raster changed by its draw."""
    image, augment = scene(tmp_path), [*PLACES, *VALUES]
    own = config(tmp_path, "own", augment, 2, augment_each="tile", tiles_per_step=1)
    drawer, expected = Drawer(augmentation(augment), ((H, W),), BANDS), []
    for step, ((_, tile, _),) in enumerate(Sampler((4,), 0, 1).steps(0)):
        disk = tmp_path / f"disk-{tile}"
        write(disk, *shown(*image, drawer.draw(f"tiledseg.augmentation 0 0 0 {tile}", 0)))
        expected.append(losses(run(still(config(disk, "plain", [], 2, tiles_per_step=1)), one_rank()))[step])
    assert losses(run(still(own), one_rank())) == expected


def still(plain: Config) -> Config:
    """Let weights stay as they are."""
    return replace(plain, optimizer=OptimizerConfig(name="sgd", lr=1e-300))


def test_a_tile_store_is_seen_as_its_raster_is(tmp_path: Path) -> None:
    """A changed raster's tiles lie across those that were cut; and so do windows."""
    scene(tmp_path)
    store, words = str(tmp_path / "tiles.h5"), ["--grid", "3", "--levels", "3", "--output"]
    images = ["--images", str(tmp_path / "image.tif"), "--labels", str(tmp_path / "labels.tif")]
    assert cut([*images, *words, store]) == 0
    windows = {"sampling": "windows", "window": 20, "windows_per_step": 4}
    for name, keys in (("tiles", {}), ("windows", windows)):
        plain = config(tmp_path, name, [*PLACES, {"scale": [0.9, 1.2]}, *VALUES], 3, 0.2, **keys)
        stored = replace(plain, data=replace(plain.data, images=[store], labels=[]))
        stored.run = RunConfig(output=str(tmp_path / f"{name}-stored"), verbosity=0)
        assert losses(run(stored, one_rank())) == losses(run(plain, one_rank()))
