"""The training loop: the configuration's group `train`, and its augmentations as a value.

`raster.places` moves pixels, `raster.samples.draws` draws, and changes their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tiledseg.config.checks import AUTO, LARGEST_HALO, MOST, check_values, number, one_of, refuse, shown, word
from tiledseg.config.words import check_best, read_loss
from tiledseg.errors import ConfigError
from tiledseg.units import ACTIVATION_BYTES

LARGEST_SHIFT = 2**20  # pixels


@dataclass(frozen=True)
class Augmentation:
    """Changes that are drawn for each raster; by default none.

    `reflect`: (rows, columns) in reverse order, each in every other draw. `turn`: 90 for quarter turns, 180 for half
    ones, 0 for none. `translate`: pixels at most, along both dims. `scale`: the least and the largest factor. `rotate`:
    degrees at most, either way. `brightness`, `contrast`: largest offset, and largest change of the factor, of each
    band; `noise`: its standard deviation at each pixel; `drop_bands`: the probability that a band is 0. Offsets and
    noise are in units of the network's input: standard deviations of a band, where it is normalised.
    """

    reflect: tuple[bool, bool] = (False, False)
    turn: int = 0
    translate: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    rotate: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0
    drop_bands: float = 0.0

    @property
    def moves(self) -> bool:
        """Return True if pixels change their places."""
        turned = self.turn > 0 or self.rotate > 0
        return any(self.reflect) or turned or self.translate > 0 or self.scale != (1.0, 1.0)

    @property
    def reach(self) -> float:
        """Return the most pixels of the raster, along rows or columns, that a distance of one pixel may be."""
        angle = math.radians(min(self.rotate, 45.0))
        return (math.cos(angle) + math.sin(angle)) / self.scale[0]

    @property
    def recolours(self) -> bool:
        """Return True if pixels change their values."""
        return max(self.brightness, self.contrast, self.noise, self.drop_bands) > 0


NOTHING = Augmentation()
_AMOUNTS = {"rotate": (180, False), "brightness": (1e6, False), "contrast": (1, True), "noise": (1e6, False)}
_AMOUNTS["drop_bands"] = 1, True
"""The largest value of each, and whether it is excluded."""
_NAMES = ("reflect", "turn", "translate", "scale", *_AMOUNTS)


def augmentation(entries: Sequence[Any]) -> Augmentation:
    """Return the value of a list such as `[{reflect: [row, col]}, turn, {scale: [0.8, 1.25]}]`. Raise ConfigError."""
    values: dict[str, Any] = {}
    for entry in entries:
        if not entry or not isinstance(entry, Mapping | str):
            raise ConfigError(f"train.augment has the entry {shown(entry)}; give a name, or a map of name to value")
        for name, value in [(entry, None)] if isinstance(entry, str) else entry.items():
            if name not in _NAMES:
                raise ConfigError(f"train.augment has '{shown(name)}'; give some of {', '.join(_NAMES)}")
            if name in values:
                raise ConfigError(f"train.augment has {name} twice; give it once")
            values[name] = _read(name, value)
    return Augmentation(**values)


def _read(name: str, value: Any) -> Any:
    """Return the field of an augmentation. Raise ConfigError for a value that it cannot have."""
    if name == "reflect":
        dims = ["row", "col"] if value is None else value if isinstance(value, list) else [value]
        if dims and all(dim in ("row", "col") for dim in dims) and len(set(dims)) == len(dims):
            return "row" in dims, "col" in dims
        remedy = "row, col or [row, col]"
    elif name == "turn":
        if value is None or (value in (90, 180) and not isinstance(value, bool)):
            return int(value or 90)
        remedy = "90 (quarter turns) or 180 (half turns)"
    elif name == "translate":
        if type(value) is int and 1 <= value <= LARGEST_SHIFT:
            return value
        remedy = f"a number of pixels from 1 to {LARGEST_SHIFT}"
    elif name == "scale":
        pair = value if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) else [0, 0]
        if 0.5 <= pair[0] <= pair[1] <= 2:
            return float(pair[0]), float(pair[1])
        remedy = "[least, largest] factor, from 0.5 to 2, such as [0.8, 1.25]"
    else:
        most, below = _AMOUNTS[name]
        if _is_number(value) and 0 < value <= most and not (below and value == most):
            return float(value)
        remedy = f"a number above 0, {'below' if below else 'at most'} {most:g}"
    given = "no value" if value is None else shown(value)
    raise ConfigError(f"train.augment has {name} with {given}; give {remedy}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


MEDIAN_FREQUENCY = "median_frequency"


@dataclass
class TrainConfig:
    """The training loop.

    Args:
        epochs: passes over the training images; auto: 500 steps' worth where tiles_per_step is chosen too, else one
        tiles_per_step: the global batch in tiles, whatever the number of ranks; null: all tiles of whole images; auto:
            4, fewer of few tiles, where tiling.grid is auto too and tiles change nothing, else null
            (docs/reference/training.md)
        images_per_step: the global batch in whole images, where tiles_per_step is not given
        loss: cross_entropy, focal, dice, tversky or boundary; {name: focal, gamma: 2} with the fields of a loss; or a
            map of some to how much each counts, as {cross_entropy: 1, dice: {weight: 0.5}} (docs/reference/losses.md)
        ema: decay of an average of the weights, with which the run validates and maps; 0: none
        best: none, or the score whose best validation is kept (checkpoints/best): mean_iou, mean_f1, accuracy, loss or
            iou.CLASS
        early_stop: epochs without a better score after which the run ends (default: never)
        largest_loss: of a step, above which the run ends and names the tile, as it does where loss or gradient is not
            finite (default: any finite one)
        class_weights: none, median_frequency (the median of all classes' frequencies over the class's own), a list of
            one weight a class, or a map of class to weight, 1 for others (docs/how-to/rare-classes.md)
        tiles_per_batch: tiles of one shape, or images and small windows under a batch norm over a step, that run as one
            batch, at most; auto: one (docs/how-to/find-settings.md)
        compile: on (the passes of a step become a few kernels of torch.compile's, equal up to rounding), off, or auto,
            which is off as long as nothing has been measured (docs/how-to/gpu.md)
        precision: fp32, bf16 or fp16 (autocast; fp16 with a loss scale, docs/reference/training.md), or fp64
        seed: of weights, shuffling and dropout
        checkpoint_every: steps between checkpoints; one more is written at the end, or at a wall-time signal
        keep_checkpoints: how many to keep, the newest first
        validate_every: epochs between validations
        resume: auto (go on from the newest checkpoint of run.output), never, or the path of a checkpoint
        deterministic: use deterministic kernels only, no TF32
        sampling: tiles, each once an epoch, or windows, drawn anywhere in the images (docs/reference/training.md)
        window: side of a window in pixels
        windows_per_step: the global batch in windows, whatever the number of ranks
        window_halo: exact, or none (each window is a small image of its own)
        skip_empty: leave out tiles, or places of windows, without a label that counts
        balance_classes: share of the tiles or windows that are drawn by class, each class as often as any other
        augment: how training images are changed, drawn anew each epoch: a list of reflect, turn, translate, scale,
            rotate, brightness, contrast, noise, drop_bands, with their values (docs/how-to/augment.md)
        augment_each: what has a draw of its own: image, or tile (with parallel.halo read)
    """

    epochs: int | Literal["auto"] = number(AUTO, 1, MOST)
    tiles_per_step: int | Literal["auto"] | None = number(AUTO, 1, MOST)
    images_per_step: int = number(1, 1, MOST)
    loss: str | dict[str, Any] = "cross_entropy"
    ema: float = number(0.0, 0.0, 1.0, below=True)
    best: str = "none"
    early_stop: int | None = number(None, 1, MOST)
    largest_loss: float | None = number(None, 0.0, 1e15, above=True)
    class_weights: str | list[float] | dict[str | int, float] = number("none", 0.0, 1e6)
    tiles_per_batch: int | Literal["auto"] = number(AUTO, 1, MOST, remedy="auto or a number of tiles from 1 on")
    compile: bool | str = AUTO
    precision: str = word("fp32", *ACTIVATION_BYTES)
    seed: int = number(0, 0, 2**63 - 1)
    checkpoint_every: int = number(100, 1, MOST)
    keep_checkpoints: int = number(3, 1, MOST)
    validate_every: int = number(1, 1, MOST)
    resume: str = "auto"
    deterministic: bool = True
    sampling: str = word("tiles", "tiles", "windows")
    window: int | None = number(None, 1, LARGEST_HALO)
    windows_per_step: int | None = number(None, 1, MOST)
    window_halo: str = word("exact", "exact", "none")
    skip_empty: bool = False
    balance_classes: float = number(0.0, 0.0, 1.0)
    augment: list[str | dict[str, Any]] = field(default_factory=list)
    augment_each: str = word("image", "image", "tile")

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot be, or that contradicts another."""
        check_values("train", self)
        augmentation(self.augment)
        read_loss(self.loss)
        self.check_best()
        self._check_windows()
        if self.augment_each != "image" and not self.augment:
            empty = "train.augment is empty: nothing is drawn"
            refuse("train.augment_each", self.augment_each, empty, "leave it out, or give train.augment")
        if isinstance(self.class_weights, str):
            one_of("train.class_weights", self.class_weights, ("none", MEDIAN_FREQUENCY))
        one_of("train.compile", self.compiles(), (AUTO, "on", "off"))
        if self.given_tiles is not None and self.images_per_step != 1:
            raise ConfigError(
                f"train.tiles_per_step is {self.tiles_per_step} and train.images_per_step {self.images_per_step}; "
                "give one of them"
            )

    def compiles(self) -> str:
        """Return auto, on or off, which YAML reads as true and false."""
        return {True: "on", False: "off"}[self.compile] if isinstance(self.compile, bool) else self.compile

    def check_best(self) -> None:
        """Raise ConfigError for a score that no validation computes; as long as the epochs are auto any number may
        be."""
        check_best(self.best, self.early_stop, MOST if self.epochs == AUTO else int(self.epochs), self.validate_every)

    @property
    def given_tiles(self) -> int | None:
        """Return the tiles of a step where they are given; None for whole images, or auto."""
        return None if isinstance(self.tiles_per_step, str) else self.tiles_per_step

    def batch(self) -> int | None:
        """Return the tiles of a batch, or None for auto."""
        return self.tiles_per_batch if isinstance(self.tiles_per_batch, int) else None

    def _check_windows(self) -> None:
        drawn = self.sampling == "windows"
        if (self.skip_empty or self.balance_classes) and self.given_tiles is None and not drawn:
            key = "skip_empty" if self.skip_empty else "balance_classes"
            remedy = "give train.tiles_per_step, or train.sampling windows"
            refuse(f"train.{key}", getattr(self, key), "a step takes whole images", remedy)
        for key in ("window", "windows_per_step"):
            value = getattr(self, key)
            if drawn != (value is not None):
                remedy = f"give train.{key}" if drawn else "leave it out, or give train.sampling windows"
                raise ConfigError(f"train.sampling is {self.sampling} and train.{key} {value or 'not given'}; {remedy}")
        if not drawn and self.window_halo != "exact":
            raise ConfigError("train.window_halo is none and train.sampling tiles; give train.sampling windows")
        others = {"tiles_per_step": (AUTO, None), "images_per_step": (1,), "augment_each": ("image",)}
        for key, defaults in others.items() if drawn else ():
            if getattr(self, key) not in defaults:
                own = "train.sampling is windows, which have windows_per_step, and a draw each"
                refuse(f"train.{key}", getattr(self, key), own, "leave it out")
