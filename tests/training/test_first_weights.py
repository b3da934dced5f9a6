"""Runs that begin with published weights: stand-ins, seeded, in torchvision's names."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.answers import errors_of
from tests.checkpoint.published import resnet
from tests.crash.runs import Material
from tests.small_files import write_raster
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.config.run import Config, ModelConfig, OptimizerConfig
from tiledseg.errors import CheckpointError, InputError
from tiledseg.models.network import build_modules


def pretrained(material: Material, folder: Path, file: Path, rate: float = 1e-12) -> Config:
    config = config_of(material, folder)
    config.model = ModelConfig("residual_unet", encoder="resnet18", base_channels=8, pretrained=str(file))
    config.optimizer = OptimizerConfig(lr=rate)
    config.tiling.grid = 1
    config.train = replace(config.train, tiles_per_step=None, precision="fp32")
    return config


def test_a_run_begins_with_a_file_says_so_and_goes_on_without_it(material: Material, tmp_path: Path) -> None:
    file, folder = tmp_path / "resnet18.pth", tmp_path / "run"
    state = resnet((2, 2, 2, 2), False, 8)
    torch.save(state, file)
    origin = {"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    config = pretrained(material, folder, file)
    config.run.verbosity = 1
    config.data.normalize = "imagenet"
    assert f"warning: the encoder begins with 100 tensors of {file}" in errors_of(lambda: run(config))
    checkpoint = find_checkpoint(folder)
    network = build_modules(checkpoint.saved.network)
    load_network(checkpoint, network)
    for name in ("conv1", "layer4.1.conv2", "layer3.0.downsample.0"):
        weight = network.state_dict()[f"layers.{name.replace('.', '-')}.weight"]
        assert torch.allclose(weight, state[f"{name}.weight"], atol=1e-9)
    assert checkpoint.saved.normalization.mean == (255 * 0.485, 255 * 0.456, 255 * 0.406)
    file.unlink()
    config.train.epochs = 2
    assert run(config) == 0
    assert json.loads((folder / "summary.json").read_text())["pretrained"] == origin
    saved = find_checkpoint(folder).saved.pretrained
    assert saved is not None
    assert {"path": saved.path, "sha256": saved.sha256} == origin
    config.model.pretrained = None
    with pytest.raises(CheckpointError, match=r"model.pretrained is .*resnet18.pth there and null in this run"):
        run(config)


def test_statistics_of_a_file_stand_still(material: Material, tmp_path: Path) -> None:
    """In tiles, and read; resumed, they may move again."""
    file, folder = tmp_path / "resnet18.pth", tmp_path / "run"
    state = resnet((2, 2, 2, 2), False, 8)
    torch.save(state, file)
    config = pretrained(material, folder, file, rate=0.01)
    config.model.freeze_norm, config.tiling.grid = True, 2
    assert run(config) == 0

    def statistics() -> torch.Tensor:
        checkpoint = find_checkpoint(folder)
        network = build_modules(checkpoint.saved.network)
        load_network(checkpoint, network)
        return network.state_dict()["layers.bn1.running_mean"]

    assert torch.equal(statistics(), state["bn1.running_mean"])
    config.model.freeze_norm, config.tiling.grid, config.train.epochs = False, 1, 2
    assert run(config) == 0
    assert not torch.equal(statistics(), state["bn1.running_mean"])


def test_what_cannot_begin_leaves_no_trace(material: Material, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "run"
    file.write_text("no weights")
    first, other, wide, unknown = (pretrained(material, folder, file) for _ in range(4))
    other.model.name, other.model.encoder = "unet", "auto"
    write_raster(tmp_path / "wide.tif", torch.zeros(3, 64, 64).numpy())
    wide.data = replace(wide.data, images=str(tmp_path / "wide.tif"), labels=str(material.root / "one-labels.tif"))
    wide.data.normalize, unknown.data.normalize = "imagenet", "cityscapes"
    for config, words in (
        (first, "cannot be read as weights"),
        (other, "no encoder of unet is published"),
        (wide, "wide.tif has 3 bands of float32; set the key to true"),
        (unknown, "data.normalize is 'cityscapes'; give one of true, false, imagenet"),
    ):
        with pytest.raises(InputError, match=words):
            run(config)
        assert not folder.exists()
