"""Windows drawn anywhere: with their halos the loss of the whole-raster network on their pixels, or small images of
their own. `test_runs.py` has them on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tests.law.cases import one_rank
from tests.law.runs import losses, run
from tests.law.shown import shown
from tests.small_files import write_raster
from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import build_network
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.parallel import MemoryConfig
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from tiledseg.config.words import augmentation
from tiledseg.errors import CheckpointError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tile
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.sampling import DrawnWindows, Position
from tiledseg.tracing.build import known, network_modules

pytestmark = pytest.mark.usefixtures("without_plots")
H, W, BANDS, SIDE = 64, 48, 2, 24
CHANGES: list[Any] = ["reflect", "turn", {"brightness": 0.4}, {"contrast": 0.4}]


def scene(folder: Path) -> tuple[NDArray, NDArray]:
    random = np.random.default_rng(4)
    labels_HW = random.integers(0, 3, (H, W)).astype(np.uint8)
    image_CHW = random.normal(size=(BANDS, H, W)) + labels_HW
    write_raster(folder / "image.tif", image_CHW)
    write_raster(folder / "labels.tif", labels_HW[None])
    return image_CHW, labels_HW


def small(folder: Path, name: str, **keys: Any) -> Config:
    train = {"sampling": "windows", "window": SIDE, "windows_per_step": 3, "precision": "fp64", "epochs": 2}
    return Config(
        data=DataConfig(str(folder / "image.tif"), str(folder / "labels.tif"), classes=3, normalize=False),
        model=ModelConfig(levels=3, convs_per_level=1, base_channels=4, norm=keys.pop("norm", "none")),
        optimizer=OptimizerConfig(name="sgd", lr=0.05),
        train=TrainConfig(**{**train, **keys}),
        run=RunConfig(output=str(folder / name), verbosity=0),
    )


def network_of(config: Config) -> Network:
    return known(build_network(config.model, BANDS, 3))


def by_hand(config: Config, image_CHW: NDArray, labels_HW: NDArray, steps: int) -> list[float]:
    """Plain torch: the whole raster, as drawn, through the network, and the loss of the windows' pixels; or all small
    images as one batch."""
    network = network_modules(network_of(config), config.train.seed).double().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    exact = config.train.window_halo == "exact"
    footprint = network_footprint(network_of(config).graph()) if exact else None
    drawer = Drawer(augmentation(config.train.augment), ((H, W),), BANDS)
    sampler = DrawnWindows(drawer, SIDE, config.train.windows_per_step or 0, config.train.seed, footprint)
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


@pytest.mark.parametrize("augment", [[], CHANGES], ids=["plain", "augmented"])
def test_exact_windows_are_trained_on_as_parts_of_the_whole_raster(augment: list[Any], tmp_path: Path) -> None:
    """Rows and columns are multiples of the alignment, so that the raster is its own context."""
    image = scene(tmp_path)
    config = small(tmp_path, "run", augment=augment)
    found = losses(run(config, one_rank()))
    assert len(found) == 2 * 2
    assert found == pytest.approx(by_hand(config, *image, steps=4), rel=1e-12)


@pytest.mark.parametrize("blocks", ["none", 2])
def test_a_window_knows_its_place_in_the_whole_raster(blocks: str | int, tmp_path: Path) -> None:
    """Of a network that brings tensors up with aligned corners, by weights that depend on the place, turned or not."""
    image = scene(tmp_path)
    config = small(tmp_path, "run", augment=["turn"], epochs=3)
    config = replace(config, model=ModelConfig(build="tests.foreign.modules:build_aligned"))
    config = replace(config, memory=MemoryConfig(blocks=blocks))
    assert losses(run(config, one_rank())) == pytest.approx(by_hand(config, *image, steps=6), rel=1e-12)


@pytest.mark.parametrize(("norm", "blocks"), [("none", "none"), ("batch", "none"), ("batch", [2, 3])])
def test_small_windows_are_a_batch_of_images(norm: str, blocks: str | list[int], tmp_path: Path) -> None:
    """With a batch norm, over all of a step: in mode layer, or in blocks."""
    image = scene(tmp_path)
    config = small(tmp_path, "run", window_halo="none", norm=norm, augment=CHANGES)
    config = replace(config, memory=MemoryConfig(blocks=blocks))
    if norm == "batch" and blocks == "none":
        config = replace(config, parallel=ParallelConfig(halo="layer"))
    assert losses(run(config, one_rank())) == pytest.approx(by_hand(config, *image, steps=4), rel=1e-11)


LABELLED: dict[str, Any] = {"skip_empty": True, "balance_classes": 0.7}


@pytest.mark.parametrize(
    ("keys", "other", "words"),
    [
        ({}, {"window": 16, "windows_per_step": 2, "window_halo": "none", "epochs": 3}, "train.window is 24 there"),
        (LABELLED, {"balance_classes": 0.5}, "train.balance_classes is 0.7"),
    ],
    ids=["plain", "by labels"],
)
def test_a_run_on_windows_goes_on_in_the_middle_of_an_epoch(
    keys: dict[str, Any], other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """What is drawn by labels is counted again. Other windows may begin where an epoch ends."""
    scene(tmp_path)
    each = {"windows_per_step": 1, "checkpoint_every": 1, "keep_checkpoints": 20}
    whole = small(tmp_path, "whole", augment=CHANGES, **each, **keys)
    expected = losses(run(whole, one_rank()))
    assert len(expected) == 12

    def onward(name: str, step: int, **changed: Any) -> list[float]:
        resume = str(tmp_path / "whole" / "checkpoints" / f"step-{step:06}")
        train = replace(whole.train, resume=resume, **changed)
        return losses(run(replace(whole, train=train, run=RunConfig(str(tmp_path / name), verbosity=0)), one_rank()))

    assert onward("onward", 8) == expected[8:]
    with pytest.raises(CheckpointError, match=rf"in the middle of an epoch of other steps: {words}"):
        onward("refused", 8, **other)
    if keys:
        assert not set(expected) & set(losses(run(small(tmp_path, "plain", augment=CHANGES, **each), one_rank())))
        return
    assert len(onward("other", 6, **other)) == 2 * 6  # of 2 windows of 16 x 16 px
    assert find_checkpoint(tmp_path / "other").saved.resumed[0].changed.keys() >= {
        f"train.{key}" for key in other if "window" in key
    }
    tiles = {"sampling": "tiles", "window": None, "windows_per_step": None, "augment": [], "epochs": 4}
    assert len(onward("tiles", 6, **tiles)) == 3
    assert "train.sampling" in find_checkpoint(tmp_path / "tiles").saved.resumed[0].changed
