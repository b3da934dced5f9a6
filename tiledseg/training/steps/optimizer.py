"""Optimizers, the course of a run, and the learning rate as a pure function of both: nothing that could drift.

The end of a run is a position, the end of epoch `train.epochs`, not a number of steps. A resumed run may have other
steps in an epoch than before (more images, another global batch), and its steps are then counted on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from tiledseg.config.run import OptimizerConfig
from tiledseg.config.words import read_policy
from tiledseg.errors import ConfigError
from tiledseg.models.frozen import factor_of
from tiledseg.raster.samples.sampling import Position


class _Eager:
    """torch.optim's methods without what wraps them for `torch.compile`: each wrapper loads `torch._dynamo` at its
    first call, which takes as long as importing torch, and does nothing where nothing is compiled."""

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
    """Group a network's parameters by their factor of the rate and their decay, each with its number in the network.

    The first of `update.lr_factors` whose pattern fits a name decides. A norm's weights and all biases have one dim.
    Those of factor 0 are in a group too; they have no gradient, and the optimizer passes over them.
    Raises ConfigError for a pattern that fits no name, and where no weight is left to train.
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
    """Build the optimizer of the group `optimizer`; clipping is the step's."""
    if update.name == "sgd":
        return SGD(parameters, lr=update.lr, momentum=update.momentum, weight_decay=update.weight_decay, foreach=True)
    return AdamW(parameters, lr=update.lr, weight_decay=update.weight_decay, foreach=True)


def learning_rate(rate: OptimizerConfig, step: int, course: Course) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    The policy gives it. `constant`: lr. `step`: lr * gamma^(epoch // size). `polynomial`: lr * (1 - t)^power. `cosine`:
    lr * (1 + cos(pi t)) / 2. Here t is the share of the epochs after the warm-up that is done. Over the first
    `warmup_steps` the rate rises linearly to lr.

    The warm-up counts steps, the policy epochs: t goes on from where it was, where a resumed run has other steps an
    epoch, and ends with the last epoch. With another number of epochs the rate is that of a run of so many.
    """
    if step < rate.warmup_steps:
        return rate.lr * (step + 1) / rate.warmup_steps
    policy, fields = read_policy(rate.policy)
    match policy:
        case "step":
            return rate.lr * fields["gamma"] ** (math.floor(course.epochs_after(step)) // fields["size"])
        case "polynomial":
            return rate.lr * (1 - course.share_after(step, rate.warmup_steps)) ** fields["power"]
        case "cosine":
            return rate.lr * (1 + math.cos(math.pi * course.share_after(step, rate.warmup_steps))) / 2
    return rate.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this rate, times its own factor where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


Mark = tuple[int, int]


@dataclass(frozen=True)
class Course:
    """A run of `epochs` epochs with, now, `steps_per_epoch` steps in each.

    `marks` are (steps, epochs) that were done where the number of steps an epoch changed, the start (0, 0) first. A run
    that was never changed has that one alone.
    """

    epochs: int
    steps_per_epoch: int
    marks: tuple[Mark, ...] = ((0, 0),)

    def onward(self, marks: Sequence[Mark], step: int, position: Position) -> Course:
        """Return the course of a run that stands at `position` after `step` steps; with one more mark if that does not
        follow from `marks` with as many steps an epoch as now."""
        begun = (step - position.step, position.epoch)  # of the epoch that goes on
        last_step, last_epoch = marks[-1]
        straight = begun == (last_step + (position.epoch - last_epoch) * self.steps_per_epoch, position.epoch)
        return replace(self, marks=tuple(marks) if straight else (*marks, begun))

    @property
    def total_steps(self) -> int:
        """The steps of the whole run: those done, and those left."""
        step, epoch = self.marks[-1]
        return step + max(0, self.epochs - epoch) * self.steps_per_epoch

    def after(self, position: Position) -> Position:
        """Return the position of the following step."""
        if position.step + 1 < self.steps_per_epoch:
            return Position(position.epoch, position.step + 1)
        return Position(position.epoch + 1, 0)

    def ends_at(self, position: Position) -> bool:
        """Return True if a run that stands there has nothing left to do."""
        return position.epoch >= self.epochs

    def epochs_after(self, steps: int) -> Fraction:
        """Return the epochs done after so many steps of the run, the begun one in part."""
        for (step, epoch), (next_step, next_epoch) in zip(self.marks, self.marks[1:], strict=False):
            if steps < next_step:
                return epoch + Fraction((steps - step) * (next_epoch - epoch), next_step - step)
        step, epoch = self.marks[-1]
        return epoch + Fraction(steps - step, self.steps_per_epoch)

    def share_after(self, steps: int, warmup_steps: int) -> float:
        """Return the share, 0 to 1, of the epochs after the warm-up that is done after so many steps."""
        warm = self.epochs_after(warmup_steps)
        if warm >= self.epochs:
            return 1.0
        # One division of whole numbers, rounded once: that of steps, where the run was never changed.
        return min(1.0, float((self.epochs_after(steps) - warm) / (self.epochs - warm)))
