"""What a checkpoint says of its run: text from its manifest, every value checked, as dataclasses.

A value of a wrong type, a missing one, an unknown one and one that no run can have are refused: with right checksums
too, for whoever edits a manifest can compute them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from tiledseg.architecture.kinds import FIRST, SAVED
from tiledseg.architecture.network import Network
from tiledseg.checkpoint.typed_json import MalformedError, parse, quoted
from tiledseg.config.parallel import ParallelConfig
from tiledseg.config.run import Config, TilingConfig
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.reading.identity import Identity
from tiledseg.raster.samples.sampling import Position
from tiledseg.raster.statistics import Normalization
from tiledseg.records import dataclass

Mark = tuple[int, int]  # steps and epochs that were done

_MEANING = ("data.bands", "data.nodata", "data.classes", "data.ignore_index", "data.normalize", "optimizer.name")


@dataclass(frozen=True)
class Place:
    """`Position` as JSON has it."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Source:
    """An image and its labels; None where a checkpoint of an older version did not record them."""

    image: Identity
    labels: Identity | None


@dataclass(frozen=True)
class Origin:
    """The file of pretrained weights that a run began with, as it was named, and its sha256."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Resumed:
    """That the run went on after `step` steps with other values: of each key {"from": ..., "to": ...}, and the files
    of its images and labels that had been `rewritten`."""

    step: int
    changed: dict[str, Any]
    rewritten: list[str]


@dataclass(frozen=True)
class Best:
    """The best validation so far by `score`: its `value`, after how many steps, and in which epoch."""

    score: str
    value: float
    step: int
    epoch: int


@dataclass(frozen=True)
class LossScale:
    """A factor of a run's mean loss in fp16, so that small gradients are not rounded to 0, and the steps since it last
    changed. Its first value and its rule are those of torch.amp.GradScaler."""

    value: float = 65536.0
    good_steps: int = 0

    def after(self, finite: bool) -> LossScale:
        """The scale of the next step: half where a gradient was not finite, twice after 2000 steps in a row."""
        if not finite:
            return LossScale(self.value / 2)
        return LossScale(self.value * 2) if self.good_steps == 1999 else LossScale(self.value, self.good_steps + 1)


@dataclass(frozen=True)
class FoundSettings:
    """What `parallel.auto` has found for so many ranks: the groups `tiling` and `parallel` as somebody would give them
    by hand, and why these. `blocks`: rows and columns of `memory.blocks`, None where tiles are computed whole."""

    ranks: int
    tiling: TilingConfig
    parallel: ParallelConfig
    reason: str
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True)
class SavedState:
    """`step` steps are done and `position` is the next one's; `marks` as `Course` has them; `sampling`: what the order
    of the steps depends on; `sources` and `judged` (none in older checkpoints): the images that it learned from, and
    those that it was validated on, as they were; `class_weights`: of the loss, none where all are 1; `found`: what
    `config` leaves to the program; `loss_scale`: of fp16."""

    config: Config
    network: Network
    normalization: Normalization
    position: Place
    sampling: dict[str, Any]
    step: int
    marks: tuple[Mark, ...] = ((0, 0),)
    sources: tuple[Source, ...] = ()
    judged: tuple[Source, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    pretrained: Origin | None = None
    random: dict[str, Any] = field(default_factory=dict)
    class_weights: tuple[float, ...] = ()
    best: Best | None = None
    found: FoundSettings | None = None
    loss_scale: LossScale | None = None

    @property
    def record(self) -> dict[str, Any]:
        """Every key of its configuration, those that came later too, as JSON has them."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self.config)))
        return record

    @property
    def label_map(self) -> LabelMap:
        """What labels mean to the network; `classes` has the name and the colour of each of its outputs."""
        data = self.config.data
        return LabelMap.from_config(data.classes, data.ignore_index)  # type: ignore[arg-type]

    @property
    def next_position(self) -> Position:
        return Position(self.position.epoch, self.position.step)


def parse_state(state: Any) -> SavedState:
    """The state of a checkpoint's manifest; raises MalformedError for the first value that cannot be."""
    named = {"config": _MEANING, "normalization": ("constant",)}
    required = [f"{group}.{key}" for group, keys in named.items() for key in keys]
    try:
        saved = parse(SavedState, state, "state", required, {"network": _parse_network})
        saved.config.data.check()
        count = saved.label_map.count
    except ConfigError as error:
        raise MalformedError(f"state: {error}") from None
    if count != saved.network.classes:
        raise MalformedError(f"state.config.data.classes has {count} classes for {saved.network.classes} outputs")
    _check_normalization(saved.normalization, saved.network.bands)
    _check_progress(saved)
    _check_weights(saved)
    _check_best(saved)
    scale = saved.loss_scale
    if scale is not None and not (1 <= scale.value < math.inf and 0 <= scale.good_steps < 2000):
        raise MalformedError(f"state.loss_scale is {quoted(asdict(scale))}, which no run has")
    return saved


def _parse_network(value: Any, name: str) -> Network:
    """A network of any kind, every field of which must be there."""
    fields = dict(value) if isinstance(value, Mapping) else value
    kind = fields.pop("kind", FIRST) if isinstance(fields, dict) else FIRST
    if not isinstance(kind, str) or kind not in SAVED:
        raise MalformedError(f"{name}.kind is {quoted(kind)}, not one of {', '.join(SAVED)}")
    network: Network = parse(SAVED[kind], fields, name, tuple(SAVED[kind].__dataclass_fields__))
    return network


def _check_normalization(found: Normalization, bands: int) -> None:
    for name in ("mean", "std"):
        values = getattr(found, name)
        if len(values) != bands:
            raise MalformedError(f"state.normalization.{name} has {len(values)} values for {bands} bands")
        wrong = [v for v in values if not math.isfinite(v) or (name == "std" and v <= 0)]
        if wrong:
            above = " above 0" if name == "std" else ""
            raise MalformedError(f"state.normalization.{name} holds {wrong[0]}, not a finite number{above}")
    if not all(0 <= band < bands for band in found.constant):
        raise MalformedError(f"state.normalization.constant is {quoted(list(found.constant))} with {bands} bands")


def _check_best(saved: SavedState) -> None:
    best = saved.best
    if best is not None and not (0 < best.step <= saved.step and best.epoch >= 0 and math.isfinite(best.value)):
        raise MalformedError(f"state.best is {quoted(asdict(best))}, where no run stands after {saved.step} steps")


def _check_weights(saved: SavedState) -> None:
    found = saved.class_weights
    if found and (len(found) != saved.network.classes or not all(math.isfinite(w) and w >= 0 for w in found)):
        raise MalformedError(f"state.class_weights is {quoted(list(found))}, not a weight a class, of none below 0")


def _check_progress(saved: SavedState) -> None:
    """Every epoch has a step at least, so no run is further in epochs than in steps."""
    epoch, index = saved.position.epoch, saved.position.step
    if min(saved.step, epoch, index) < 0 or epoch + index > saved.step:
        raise MalformedError(
            f"state.position is epoch {epoch}, step {index} after {saved.step} steps, where no run stands"
        )
    places = [*saved.marks, (saved.step + 1, epoch + 1)]
    rising = all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(places))
    if saved.marks[:1] != ((0, 0),) or not rising:
        raise MalformedError(f"state.marks is {quoted(saved.marks)}, not rising from (0, 0) to epoch {epoch}")
