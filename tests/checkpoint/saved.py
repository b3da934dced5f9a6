"""Checkpoints for tests: a small network that has learned for as many steps as its checkpoint tells; and manifests that
are changed and get right checksums again: somebody can write them, and no run does."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiledseg.architecture.unet import UNet
from tiledseg.checkpoint.folder import contents_of, own_checksum, save_checkpoint, sha256
from tiledseg.config.run import Config, DataConfig, OptimizerConfig
from tiledseg.models.network import build_modules
from tiledseg.training.optimizer import build_optimizer

FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")


def unet(channels: int = 3) -> UNet:
    """A network with every kind of entry: weights, biases, buffers."""
    return UNet(levels=1, convs_per_level=1, base_channels=channels, norm="batch", bands=2)


def make_network(seed: int = 0, channels: int = 3) -> nn.Module:
    return build_modules(unet(channels), seed).to(torch.get_default_dtype()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        network(torch.randn(1, 2, 6, 6, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(step: int, optimizer: OptimizerConfig | None = None) -> dict[str, Any]:
    """What a run after `step` steps of its first epoch says of itself."""
    data = DataConfig("a.tif", "b.tif", classes={10: 0, 9: 1, "8": None})  # JSON makes text of the keys
    return {
        "config": asdict(Config(data=data, optimizer=optimizer or OptimizerConfig())),
        "network": asdict(unet()),
        "normalization": {"mean": [0.1, 1e-300], "std": [1.0, 2.5], "constant": []},
        "position": {"epoch": 0, "step": step},
        "sampling": {},
        "step": step,
    }


def save(folder: Path, step: int, keep: int = 9, seed: int = 0) -> Path:
    """A checkpoint whose weights tell its step."""
    network = make_network(seed)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, step)
    return save_checkpoint(folder, contents_of(network, optimizer), state_of(step), keep)


Manifest = dict[str, Any]


def seal(step: Path, change: Callable[[Manifest], object]) -> None:
    """Change the manifest, and give it the checksums of all as it is then."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest.pop("own_checksum", None)
    manifest["checksums"] = {file.name: sha256(file) for file in sorted(step.glob("*.safetensors"))}
    change(manifest)
    (step / "manifest.json").write_text(json.dumps({**manifest, "own_checksum": own_checksum(manifest)}))
