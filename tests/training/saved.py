"""Checkpoints for tests: a small network that has learned for as many steps as its checkpoint tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiledseg.config import OptimizerConfig
from tiledseg.training.checkpoint import (
    contents_of,
    save_checkpoint,
)
from tiledseg.training.optimizer import build_optimizer

FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")


def make_network(seed: int = 0, channels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(2, channels, 3), nn.BatchNorm2d(channels), nn.Conv2d(channels, 2, 1))
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        network(torch.randn(1, 2, 6, 6, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(step: int) -> dict[str, Any]:
    return {
        "config": {"data": {"classes": {10: 0, 9: 1, "8": None}}},  # keys that JSON turns into text, in another order
        "network": {},
        "normalization": {"mean": [0.1, 1e-300]},
        "position": {"epoch": 0, "step": step},
        "sampling": {},
        "step": step,
    }


def save(folder: Path, step: int, keep: int = 9, seed: int = 0) -> Path:
    """A checkpoint whose weights tell its step."""
    network = make_network(seed)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, step)
    return save_checkpoint(folder, step, contents_of(network, optimizer), state_of(step), keep)
