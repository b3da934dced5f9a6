"""Training with an augmentation is training on the changed rasters as if they lay on the disk. Windows drawn anywhere
have, with their halos, the loss of the whole-raster network on their pixels, or are small images of their own.
`test_runs.py` has both on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tests.law.cases import one_rank
from tests.law.runs import changed, configuration, losses, run
from tests.small_files import write_raster
from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import build_network
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config, ModelConfig, OptimizerConfig, TrainConfig
from tiledseg.config.words import augmentation
from tiledseg.errors import CheckpointError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tile
from tiledseg.raster.samples.draws import Draw, Drawer, pixel_noise
from tiledseg.raster.samples.sampling import DrawnWindows, Position, Sampler
from tiledseg.tile import main as cut
from tiledseg.tracing.build import known, network_modules

pytestmark = pytest.mark.usefixtures("without_plots")
H, W, BANDS, SIDE, NODATA = 64, 48, 3, 24, -99
PLACES: list[Any] = ["reflect", "turn", {"translate": 7}]
VALUES: list[Any] = [{"brightness": 0.3}, {"contrast": 0.3}, {"noise": 0.2}, {"drop_bands": 0.3}]
ALIGNED = ModelConfig(build="tests.foreign.modules:build_aligned")
CHANGES: list[Any] = ["reflect", "turn", {"brightness": 0.4}, {"contrast": 0.4}]


def scene(folder: Path, whole: bool = False) -> tuple[NDArray, NDArray]:
    """Write an image, with a part without data if not `whole`, and its labels."""
    labels_HW = (np.add.outer(np.arange(H) // 9, np.arange(W) // 7) % 3).astype(np.uint8)
    image_CHW = np.random.default_rng(2).normal(size=(BANDS, H, W)) + labels_HW
    if not whole:
        image_CHW[:, 30:34, 5:20] = NODATA
    write(folder, image_CHW, labels_HW)
    return image_CHW, labels_HW


def write(folder: Path, image_CHW: NDArray, labels_HW: NDArray) -> None:
    folder.mkdir(exist_ok=True)
    write_raster(folder / "image.tif", image_CHW, nodata=float(NODATA))
    write_raster(folder / "labels.tif", labels_HW[None].astype(np.uint8))


def config(folder: Path, name: str, **keys: Any) -> Config:
    """A run of one image; `keys` are those of `train`, and `grid`, `dropout`, `norm`."""
    model = {key: keys.pop(key) for key in ("dropout", "norm") if key in keys}
    groups = {
        **{"data.normalize": False, "data.val_images": [], "data.val_labels": []},
        "tiling.grid": keys.pop("grid", "auto"),
        "model": ModelConfig(levels=3, convs_per_level=1, base_channels=4, **model),
        "optimizer": OptimizerConfig(name="sgd", lr=0.05),
        "train": TrainConfig(**{"precision": "fp64", **keys}),
    }
    return configuration(folder, name, groups)


def windows(folder: Path, name: str, **keys: Any) -> Config:
    return config(folder, name, **{"windows": {"size": SIDE, "per_step": 3}, "epochs": 2, **keys})


def shown(image_CHW: NDArray, labels_HW: NDArray, draw: Draw | None) -> tuple[NDArray, NDArray]:
    """Look up, by numpy, what a draw shows of a whole raster; beyond the raster there is no data."""
    if draw is None:
        return image_CHW, labels_HW
    if draw.view is not None:
        height, width = labels_HW.shape
        rows, cols = draw.view.to_raster @ np.indices(draw.view.shape).astype(float)
        beyond_HW = ~((rows > -0.5) & (rows < height - 0.5) & (cols > -0.5) & (cols < width - 0.5))
        rows, cols = np.clip(rows, 0, height - 1), np.clip(cols, 0, width - 1)
        labels_HW = labels_HW[np.floor(rows + 0.5).astype(int), np.floor(cols + 0.5).astype(int)]
        nodata_HW, total_CHW = np.zeros(rows.shape, bool), np.zeros((len(image_CHW), *rows.shape))
        for row_at, row_share in ((np.floor(rows), 1 - rows % 1), (np.ceil(rows), rows % 1)):
            for col_at, col_share in ((np.floor(cols), 1 - cols % 1), (np.ceil(cols), cols % 1)):
                corner_CHW = image_CHW[:, row_at.astype(int), col_at.astype(int)]
                share_HW = row_share * col_share
                total_CHW += corner_CHW * share_HW
                nodata_HW |= (corner_CHW[0] == NODATA) & (share_HW > 0)
        image_CHW = np.where(nodata_HW | beyond_HW, NODATA, total_CHW)
    if draw.photometry is not None:
        pixels_CHW = image_CHW * np.array(draw.photometry.factors)[:, None, None]
        pixels_CHW += np.array(draw.photometry.offsets)[:, None, None]
        noise_CHW = pixel_noise(draw.photometry.key, len(pixels_CHW), *map(np.arange, labels_HW.shape))
        pixels_CHW += noise_CHW * np.float32(draw.photometry.noise)
        pixels_CHW[~np.array(draw.photometry.kept)] = 0
        image_CHW = np.where(image_CHW[0] == NODATA, NODATA, pixels_CHW)
    return image_CHW, labels_HW


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
    found = losses(run(config(tmp_path, "augmented", augment=augment, grid=[2, 3], **keys), one_rank()))
    expected = losses(run(config(disk, "plain", grid=[3, 2] if is_turned else [2, 3], **keys), one_rank()))
    assert found == pytest.approx(expected, rel=bound, abs=0)
    assert found != losses(run(config(tmp_path, "unchanged", grid=[2, 3], **keys), one_rank()))


def test_each_tile_is_one_of_its_own_changed_raster(tmp_path: Path) -> None:
    """With `augment_each: tile`: the loss of a tile is that of the same tile of a raster changed by its draw."""
    image, augment = scene(tmp_path), [*PLACES, *VALUES]
    own = config(tmp_path, "own", augment=augment, grid=2, augment_each="tile", tiles_per_step=1)
    drawer, expected = Drawer(augmentation(augment), ((H, W),), BANDS), []
    for step, ((_, tile, _),) in enumerate(Sampler((range(4),), 0, 1).steps(0)):
        disk = tmp_path / f"disk-{tile}"
        write(disk, *shown(*image, drawer.draw(f"tiledseg.augmentation 0 0 0 {tile}", 0)))
        expected.append(losses(run(still(config(disk, "plain", grid=2, tiles_per_step=1)), one_rank()))[step])
    assert losses(run(still(own), one_rank())) == expected


def still(plain: Config) -> Config:
    """Let weights stay as they are."""
    return changed(plain, {"optimizer.lr": 1e-300})


def test_a_tile_store_is_seen_as_its_raster_is(tmp_path: Path) -> None:
    """A changed raster's tiles lie across those that were cut; and so do windows."""
    scene(tmp_path)
    store, words = str(tmp_path / "tiles.h5"), ["--grid", "3", "--levels", "3", "--output"]
    images = ["--images", str(tmp_path / "image.tif"), "--labels", str(tmp_path / "labels.tif")]
    assert cut([*images, *words, store]) == 0
    keys = {"augment": [*PLACES, {"scale": [0.9, 1.2]}, *VALUES], "grid": 3, "dropout": 0.2}
    for name, made in (("tiles", config), ("windows", windows)):
        plain = made(tmp_path, name, **keys)
        stored = {"data.images": [store], "data.labels": [], "run.output": str(tmp_path / f"{name}-stored")}
        assert losses(run(changed(plain, stored), one_rank())) == losses(run(plain, one_rank()))


def network_of(config: Config) -> Network:
    return known(build_network(config.model, BANDS, 3))


def by_hand(config: Config, image_CHW: NDArray, labels_HW: NDArray, steps: int) -> list[float]:
    """Plain torch: the whole raster, as drawn, through the network, and the loss of the windows' pixels; or all small
    images as one batch."""
    network = network_modules(network_of(config), config.train.seed).double().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    fields = config.train.windows or {}
    exact = "halo" not in fields
    footprint = network_footprint(network_of(config).graph()) if exact else None
    drawer = Drawer(augmentation(config.train.augment), ((H, W),), BANDS)
    sampler = DrawnWindows(drawer, SIDE, fields["per_step"], config.train.seed, footprint)
    found = []
    for position, step in list(sampler.steps_from(Position(0, 0), config.train.epochs))[:steps]:
        assert position.step < sampler.steps_per_epoch
        drawn = [shown(image_CHW, labels_HW, reference.draw) for reference in step]
        if exact:
            logits, targets = [], []
            for (pixels_CHW, classes_HW), (_, tile, _) in zip(drawn, step, strict=True):
                assert isinstance(tile, Tile)
                rows, cols = tile.core.slices
                logits.append(network(torch.from_numpy(pixels_CHW.copy())[None])[0, :, rows, cols].flatten(1))
                targets.append(classes_HW[rows, cols].ravel())
            logits_PK, target_P = torch.cat(logits, 1).T, np.concatenate(targets)
        else:
            batch_BCHW = torch.from_numpy(np.stack([pixels_CHW for pixels_CHW, _ in drawn]))
            logits_PK = network(batch_BCHW).permute(0, 2, 3, 1).reshape(-1, 3)
            target_P = np.stack([classes_HW for _, classes_HW in drawn]).ravel()
        loss = functional.cross_entropy(logits_PK, torch.from_numpy(target_P.astype(np.int64)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("augment", "model", "blocks"),
    [([], None, "none"), (CHANGES, None, "none"), (["turn"], ALIGNED, "none"), (["turn"], ALIGNED, 2)],
)
def test_exact_windows_are_trained_on_as_parts_of_the_whole_raster(
    augment: list[Any], model: ModelConfig | None, blocks: str | int, tmp_path: Path
) -> None:
    """Rows and columns are multiples of the alignment, so that the raster is its own context. Weights of aligned
    corners depend on the place, turned or not."""
    image = scene(tmp_path, whole=True)
    own = windows(tmp_path, "run", augment=augment, epochs=3)
    own = changed(own, {"model": model or own.model, "memory.blocks": blocks})
    assert losses(run(own, one_rank())) == pytest.approx(by_hand(own, *image, steps=6), rel=1e-12)


@pytest.mark.parametrize(("norm", "blocks"), [("none", "none"), ("batch", "none"), ("batch", [2, 3])])
def test_small_windows_are_a_batch_of_images(norm: str, blocks: str | list[int], tmp_path: Path) -> None:
    """With a batch norm, over all of a step: in mode layer, or in blocks."""
    image = scene(tmp_path, whole=True)
    own = windows(tmp_path, "run", windows=SMALL, norm=norm, augment=CHANGES)
    own = changed(own, {"memory.blocks": blocks})
    if norm == "batch" and blocks == "none":
        own = changed(own, {"parallel.halo": "layer"})
    assert losses(run(own, one_rank())) == pytest.approx(by_hand(own, *image, steps=4), rel=1e-11)


SMALL = {"size": SIDE, "per_step": 3, "halo": "none"}
LABELLED: dict[str, Any] = {"skip_empty": True, "balance_classes": 0.7}


@pytest.mark.parametrize(
    ("keys", "other", "words"),
    [
        ({}, {"windows": {**SMALL, "size": 16, "per_step": 2}, "epochs": 3}, "train.windows is {'size': 24.* there"),
        (LABELLED, {"balance_classes": 0.5}, "train.balance_classes is 0.7"),
    ],
    ids=["plain", "by labels"],
)
def test_a_run_on_windows_goes_on_in_the_middle_of_an_epoch(
    keys: dict[str, Any], other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """What is drawn by labels is counted again. Other windows may begin where an epoch ends."""
    scene(tmp_path, whole=True)
    each = {"windows": {"size": SIDE, "per_step": 1}, "checkpoint_every": 1, "keep_checkpoints": 20}
    whole = windows(tmp_path, "whole", augment=CHANGES, **each, **keys)
    expected = losses(run(whole, one_rank()))
    assert len(expected) == 12

    def onward(name: str, step: int, **others: Any) -> list[float]:
        keys = {f"train.{key}": value for key, value in others.items()}
        keys["train.resume"] = str(tmp_path / "whole" / "checkpoints" / f"step-{step:06}")
        return losses(run(changed(whole, keys | {"run.output": str(tmp_path / name)}), one_rank()))

    assert onward("onward", 8) == expected[8:]
    with pytest.raises(CheckpointError, match=rf"in the middle of an epoch of other steps: {words}"):
        onward("refused", 8, **other)
    if keys:
        assert not set(expected) & set(losses(run(windows(tmp_path, "plain", augment=CHANGES, **each), one_rank())))
        return
    assert len(onward("other", 6, **other)) == 2 * 6  # of 2 windows of 16 x 16 px
    assert "train.windows" in find_checkpoint(tmp_path / "other").saved.resumed[0].changed
    tiles = {"windows": None, "augment": [], "epochs": 4}
    assert len(onward("tiles", 6, **tiles)) == 3
    assert "train.windows" in find_checkpoint(tmp_path / "tiles").saved.resumed[0].changed
