"""Optimizers, the course of a run, the learning rate, and an average of the weights.

A run ends at a position, the end of epoch `train.epochs`, not after a number of steps. A resumed run may have another
number of steps an epoch (more images, another global batch), and its step counter goes on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tiledseg.config.run import OptimizerConfig
from tiledseg.config.words import read_policy
from tiledseg.errors import ConfigError
from tiledseg.execution.agreement import own_state
from tiledseg.models.frozen import by_memory, factor_of
from tiledseg.raster.samples.sampling import Position


class _Eager:
    """Methods of torch.optim without their wrappers for `torch.compile`. A wrapper imports `torch._dynamo` at its first
    call, which takes as long as importing torch, and has no other effect outside `torch.compile`."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_Eager, torch.optim.AdamW):
    """torch's AdamW, to the last bit."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(_Eager, torch.optim.SGD):
    """torch's SGD, to the last bit."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


Groups = list[dict[str, Any]]


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], update: OptimizerConfig) -> Groups:
    """Group a network's parameters by learning-rate factor and weight decay; a group has each one's number too.

    The first pattern of `update.lr_factors` that matches a name gives its factor. Norm weights and biases have one
    dim. Parameters of factor 0 form a group too; they have no gradient, so the optimizer skips them. Raises ConfigError
    for a pattern that matches no name, and if all factors are 0.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    unused = set(update.lr_factors)
    for index, (name, parameter) in enumerate(named):
        unused = {pattern for pattern in unused if not fnmatchcase(name, pattern)}
        factor = factor_of(name, update.lr_factors)
        decay = update.weight_decay if update.decay_norms or parameter.ndim > 1 else 0.0
        new = {"params": [], "indices": [], "factor": factor, "weight_decay": decay}
        group = groups.setdefault((factor, decay), new)
        group["params"].append(parameter)
        group["indices"].append(index)
    if unused:
        raise ConfigError(
            f"optimizer.lr_factors has '{min(unused)}', which fits no name of a weight; give patterns of names such as "
            f"{name}"
        )
    if groups and not any(group["factor"] for group in groups.values()):
        raise ConfigError(
            f"optimizer.lr_factors has 0 for all {index + 1} weights, {name} among them; leave some to be trained"
        )
    return list(groups.values())


def build_optimizer(parameters: Iterable[nn.Parameter] | Groups, update: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the group `optimizer`. The step clips the gradient."""
    if update.name == "sgd":
        return SGD(parameters, lr=update.lr, momentum=update.momentum, weight_decay=update.weight_decay, foreach=True)
    return AdamW(parameters, lr=update.lr, weight_decay=update.weight_decay, foreach=True)


def learning_rate(rate: OptimizerConfig, step: int, course: Course, position: Position) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, at `position`.

    Policies: `constant`: lr. `step`: lr * gamma^(epoch // size). `polynomial`: lr * (1 - t)^power. `cosine`: lr * (1 +
    cos(pi t)) / 2. t is the share done of the steps after the warm-up. It follows from the position, so it stays
    continuous if a resumed run has other steps an epoch. Over the first `warmup_steps` the rate rises linearly to lr.
    """
    if step < rate.warmup_steps:
        return rate.lr * (step + 1) / rate.warmup_steps
    policy, fields = read_policy(rate.policy)
    match policy:
        case "step":
            return rate.lr * fields["gamma"] ** (position.epoch // fields["size"])
        case "polynomial":
            return rate.lr * (1 - course.share(position, rate.warmup_steps)) ** fields["power"]
        case "cosine":
            return rate.lr * (1 + math.cos(math.pi * course.share(position, rate.warmup_steps))) / 2
    return rate.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of each parameter group: `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


@dataclass(frozen=True)
class Course:
    """The length of a run: `epochs` epochs of `steps_per_epoch` steps each."""

    epochs: int
    steps_per_epoch: int

    def left(self, position: Position) -> int:
        """Return the number of steps from `position` to the end."""
        return max(0, (self.epochs - position.epoch) * self.steps_per_epoch - position.step)

    def after(self, position: Position) -> Position:
        """Return the position of the following step."""
        if position.step + 1 < self.steps_per_epoch:
            return Position(position.epoch, position.step + 1)
        return Position(position.epoch + 1, 0)

    def share(self, position: Position, warmup_steps: int) -> float:
        """Return the share, 0 to 1, of the steps after the warm-up that is done."""
        after_warmup = self.epochs * self.steps_per_epoch - warmup_steps
        done = position.epoch * self.steps_per_epoch + position.step - warmup_steps
        return min(1.0, max(0, done) / after_warmup) if after_warmup > 0 else 1.0


class AveragedWeights:
    """An exponential moving average of the weights, used in validation and for maps.

    After step t, counted from 1: average <- d average + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)). A
    young average soon forgets its first weights (TensorFlow's ExponentialMovingAverage, num_updates). Running
    statistics are averaged too; integer counts are copied. Each rank averages its own part of `network`, in its dtypes.
    Ranks with the same weights get the same average, to the last bit. `begun`: the average in the resumed checkpoint.
    """

    def __init__(self, network: nn.Module, decay: float, begun: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._network, self._decay = network, decay
        self.tensors = {name: tensor.clone() for name, tensor in own_state(network).items()}
        for name, tensor in begun:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)

    def update(self, step: int) -> None:
        """Add the weights after optimizer step number `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, tensor in own_state(self._network).items():
                average = self.tensors[name]
                if average.is_floating_point():
                    average.lerp_(tensor, share)
                else:
                    average.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the network in the block, and back afterwards, to the last bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for names in by_memory(own_state(self._network)):
                held = {name: tensor.clone() for name, tensor in names.items()}
                for name, tensor in names.items():
                    tensor.copy_(self.tensors[name])
                for name, tensor in held.items():
                    self.tensors[name].copy_(tensor)
