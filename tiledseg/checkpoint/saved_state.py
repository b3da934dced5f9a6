"""The model of a checkpoint's record: the state in its manifest, as dataclasses.

A checksum protects the manifest, so values are not checked one by one: a record that does not fit the model is another
version's or program's.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import FIRST, SAVED
from tiledseg.config.run import Config
from tiledseg.config.words import without_moved
from tiledseg.raster.labels.classes import records_of_map
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.reader import Identity
from tiledseg.raster.samples.sampling import Position
from tiledseg.raster.statistics import Normalization

_OLD = ("marks", "found", "random")  # entries that older versions wrote


@dataclass(frozen=True)
class Source:
    """An image and its labels; None in a checkpoint of an older version."""

    image: Identity
    labels: Identity | None


@dataclass(frozen=True)
class Origin:
    """The file of pretrained weights with which a run began: its path as given, and its sha256."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Resumed:
    """A resumption after `step` steps: each `changed` key's {"from": ..., "to": ...}, and the files of images and
    labels that had been `rewritten`."""

    step: int
    changed: dict[str, Any]
    rewritten: list[str]


@dataclass(frozen=True)
class Best:
    """The best validation so far by `score`: its value, step and epoch."""

    score: str
    value: float
    step: int
    epoch: int


@dataclass(frozen=True)
class LossScale:
    """The factor of a run's mean loss in fp16, which keeps small gradients from rounding to 0, and the steps since its
    last change. First value and rule are those of torch.amp.GradScaler."""

    value: float = 65536.0
    good_steps: int = 0

    def after(self, finite: bool) -> LossScale:
        """Return the scale of the next step: half after a gradient that is not finite, twice after 2000 good steps."""
        if not finite:
            return LossScale(self.value / 2)
        return LossScale(self.value * 2) if self.good_steps == 1999 else LossScale(self.value, self.good_steps + 1)


@dataclass(frozen=True)
class SavedState:
    """The state of a run after `step` steps. `position`: of the next step. `sampling`: the facts on which the order of
    steps depends. `sources`, `judged` (empty in older checkpoints): the training and the validation images.
    `class_weights`: of the loss, empty if all are 1. `loss_scale`: of fp16."""

    config: Config
    network: Network
    normalization: Normalization
    position: Position
    sampling: dict[str, Any]
    step: int
    sources: tuple[Source, ...] = ()
    judged: tuple[Source, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    pretrained: Origin | None = None
    class_weights: tuple[float, ...] = ()
    best: Best | None = None
    loss_scale: LossScale | None = None

    @property
    def label_map(self) -> LabelMap:
        """The map from label values to the network's classes."""
        data = self.config.data
        return LabelMap.from_config(records_of_map(data.classes), data.ignore_index)


def parse_state(state: Any) -> SavedState:
    """Return the state of a manifest. Raises ConfigError, or any of Python's errors, for a record that does not fit."""
    words = dict(state["network"])
    state = {key: value for key, value in state.items() if key not in _OLD}
    network = _as(SAVED[words.pop("kind", FIRST)], words)
    return _as(SavedState, {**state, "config": without_moved(state["config"]), "network": network})


def _as(hint: Any, value: Any) -> Any:
    """Return a JSON value converted to its type hint: maps to dataclasses, lists to tuples, others unchanged."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if (is_dataclass(hint) or hint is Position) and isinstance(value, Mapping):
        hints = typing.get_type_hints(hint)
        return hint(**{key: _as(hints.get(key), each) for key, each in value.items()})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType) and value is not None:
        nested = [each for each in inner if is_dataclass(each) or typing.get_origin(each) is tuple]
        return _as(nested[0], value) if nested else value
    if origin is tuple and isinstance(value, list):
        each_hint = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_as(one, part) for one, part in zip(each_hint, value, strict=True))
    return value
