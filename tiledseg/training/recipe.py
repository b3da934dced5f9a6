"""What a training run is told beside its plan, as values, by `training.preparing.preparation` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledseg.raster.samples.content import ByContent


@dataclass(frozen=True)
class Update:
    """What the optimizer does with gradients: the keys of the group `optimizer` of these names."""

    name: str
    lr: float
    lr_factors: dict[str, float]
    momentum: float
    weight_decay: float
    decay_norms: bool
    clip_norm: float


@dataclass(frozen=True)
class Rate:
    """A learning-rate policy (`config.words.read_policy`); `lr` is scaled to the step's size where that is wanted."""

    lr: float
    policy: str
    warmup_steps: int
    size: float = 20
    gamma: float = 0.1
    power: float = 0.9


@dataclass(frozen=True)
class Judge:
    """`score`: the name of what makes a validation the best, None for nothing; `number`: of the class whose IoU it is;
    `patience`: epochs without a better one after which the run ends, None for any number."""

    score: str | None = None
    number: int | None = None
    patience: int | None = None


@dataclass(frozen=True)
class Cadence:
    """When the run ends, validates (both in epochs) and writes checkpoints (in steps), and how many of these it
    keeps; `judge`: of its validations; `largest_loss`: of a step, above which the run ends, None for any finite one."""

    epochs: int
    validate_every: int
    checkpoint_every: int
    keep_checkpoints: int
    judge: Judge
    largest_loss: float | None = None


@dataclass(frozen=True)
class Recipe:
    """`title`: the network's name; `seed`: of weights and dropout; `wide_sums`: gradients are summed in float64;
    `pretrained`: a file of first weights; `still_norms`: running statistics of batch norms are constants;
    `imagenet`: its mean and deviation normalise the first three bands; `counts_classes`: weights of classes are
    counted; `by_content`: tiles or windows are drawn by their labels; `ema`: decay of the average of the
    weights, 0 for none; `threads` read `prefetch` tiles ahead on each rank; `record`: every key of the
    configuration as JSON, which a checkpoint keeps; `compiles`: passes with gradients are compiled; `verify`: a traced
    network is compared with its module first; `store`: where
    blocks lie between segments, or what autograd keeps. The rest as the keys of
    these names."""

    title: str
    folder: Path
    verbosity: int
    panels: int
    resume: str
    seed: int
    precision: str
    wide_sums: bool
    pretrained: str | None
    still_norms: bool
    normalize: bool
    imagenet: bool
    counts_classes: bool
    by_content: ByContent | None
    ema: float
    threads: int
    prefetch: int
    cadence: Cadence
    update: Update
    rate: Rate
    record: dict[str, Any]
    store: str = "host"
    recompute: str = "auto"
    compiles: bool = False
    verify: bool = True
