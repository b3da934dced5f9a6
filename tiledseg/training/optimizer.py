"""Optimizers, and the learning rate as a pure function of the step: nothing to save, nothing to drift on resume."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from tiledseg.config import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the configuration names."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, foreach=True
        )
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, foreach=True)


def learning_rate(config: OptimizerConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    constant: lr. step: lr * gamma^(epoch // step_size). polynomial: lr * (1 - t)^power and cosine:
    lr * (1 + cos(pi t)) / 2, with t the share of all steps behind the warm-up. Over the first `warmup_steps` the rate
    rises linearly to lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    match config.policy:
        case "step":
            return config.lr * config.gamma ** (step // steps_per_epoch // config.step_size)
        case "polynomial":
            return config.lr * max(0.0, 1 - done) ** config.power
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * min(1.0, done))) / 2
    return config.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
