"""The training loop: the configuration's group `train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tiledseg.config.checks import AUTO, LARGEST_HALO, MOST, Group, Need, conditional, number, refuse, shown, word
from tiledseg.config.words import SCORE_WORDS, SCORES, augmentation, class_of, read_loss
from tiledseg.errors import ConfigError
from tiledseg.units import ACTIVATION_BYTES

MEDIAN_FREQUENCY = "median_frequency"
_TILES = Need("windows", "null", lambda train: train.windows is None or train.tiles_per_step is None)
_IMAGES = Need("windows", "null", lambda train: train.windows is None)
_FEW = Need("tiles_per_step", "a number, or windows", lambda train: train.windows or train.given_tiles is not None)


@dataclass
class WindowFields(Group):
    """The fields of `train.windows`. `size`: side in pixels. `per_step`: the global batch. `halo`: exact, or none (each
    window is a small image of its own)."""

    size: int = number(None, 1, LARGEST_HALO)
    per_step: int = number(None, 1, MOST)
    halo: str = word("exact", "exact", "none")


@dataclass
class TrainConfig(Group):
    """The training loop.

    Args:
        epochs: passes over the training images; auto: 500 steps' worth where the grid and tiles_per_step are auto too
            and tiles change nothing, else one (docs/reference/training.md)
        tiles_per_step: the global batch in tiles, on any number of ranks; null: all tiles of whole images. With auto, 4
            or fewer where tiling.grid is auto too and tiles change nothing, else null (docs/reference/training.md)
        images_per_step: the global batch in whole images, where tiles_per_step is not given
        loss: cross_entropy, focal, dice, tversky or boundary; {name: focal, gamma: 2} with the fields of a loss; or a
            map of losses to weights, as {cross_entropy: 1, dice: {weight: 0.5}} (docs/reference/losses.md)
        ema: decay of a moving average of the weights, which validates and maps; 0: none
        best: none, or the score by which the best checkpoint is kept: mean_iou, mean_f1, accuracy, loss or iou.CLASS
        early_stop: epochs without a better score after which the run ends (default: never)
        largest_loss: loss of a step above which the run ends (default: any finite loss)
        class_weights: none, median_frequency (the median of all classes' frequencies over the class's own), a list of
            one weight a class, or a map of class to weight, 1 for others (docs/how-to/rare-classes.md)
        tiles_per_batch: most tiles of one shape that run as one batch (under a batch norm over a step: images, small
            windows); auto: one (docs/how-to/find-settings.md)
        compile: on (torch.compile, equal up to rounding), off, or auto, which is off (docs/how-to/gpu.md)
        precision: fp32, bf16 or fp16 (autocast; fp16 with a loss scale, docs/reference/training.md), or fp64
        seed: seed of weights, shuffling and dropout
        checkpoint_every: steps between checkpoints; one more is written at the end, or at a signal to stop
        keep_checkpoints: number of newest checkpoints to keep
        validate_every: epochs between validations
        resume: auto (go on from the newest checkpoint of run.output), never, or the path of a checkpoint
        deterministic: use deterministic kernels only, no TF32
        windows: in place of tiles, each once an epoch: windows drawn anywhere in the images, {size: PIXELS, per_step:
            the global batch, halo: exact, or none where each is a small image of its own} (docs/reference/training.md)
        skip_empty: leave out tiles, or places of windows, without a label that counts
        balance_classes: share of the tiles or windows that are drawn by class, each class as often as any other
        augment: changes of training images, drawn anew each epoch: a list of reflect, turn, translate, scale, rotate,
            brightness, contrast, noise, drop_bands, with their values (docs/how-to/augment.md)
        augment_each: unit of a draw: image, or tile (with parallel.halo read)
    """

    epochs: int | Literal["auto"] = number(AUTO, 1, MOST, texts=(AUTO,))
    tiles_per_step: int | Literal["auto"] | None = number(AUTO, 1, MOST, texts=(AUTO,), need=_TILES)
    images_per_step: int = number(1, 1, MOST, need=_IMAGES)
    loss: str | dict[str, Any] = "cross_entropy"
    ema: float = number(0.0, 0.0, 1.0, below=True)
    best: str = "none"
    early_stop: int | None = number(None, 1, MOST, need=Need("best", SCORE_WORDS, lambda train: train.best != "none"))
    largest_loss: float | None = number(None, 0.0, 1e15, above=True)
    class_weights: str | list[float] | dict[str | int, float] = number(
        "none", 0.0, 1e6, texts=("none", MEDIAN_FREQUENCY), remedy="none, median_frequency, or weights from 0 to 1e6"
    )
    tiles_per_batch: int | Literal["auto"] = number(
        AUTO, 1, MOST, texts=(AUTO,), remedy="auto or a number of tiles from 1 on"
    )
    compile: bool | str = word(AUTO, AUTO, "on", "off")
    precision: str = word("fp32", *ACTIVATION_BYTES)
    seed: int = number(0, 0, 2**63 - 1)
    checkpoint_every: int = number(100, 1, MOST)
    keep_checkpoints: int = number(3, 1, MOST)
    validate_every: int = number(1, 1, MOST)
    resume: str = "auto"
    deterministic: bool = True
    windows: dict[str, Any] | None = None
    skip_empty: bool = conditional(False, _FEW)
    balance_classes: float = number(0.0, 0.0, 1.0, need=_FEW)
    augment: list[str | dict[str, Any]] = field(default_factory=list)
    augment_each: str = word("image", "image", "tile", need=Need("augment", "a change", lambda train: train.augment))

    def check_together(self) -> None:
        augmentation(self.augment)
        read_loss(self.loss)
        self.check_best()
        if self.drawn() is not None and self.augment_each != "image":
            own = "train.windows are given, each of which has a draw of its own"
            refuse("train.augment_each", self.augment_each, own, "leave it out")
        if self.given_tiles is not None and self.images_per_step != 1:
            raise ConfigError(
                f"train.tiles_per_step is {self.tiles_per_step} and train.images_per_step {self.images_per_step}; "
                "give one of them"
            )

    def drawn(self) -> WindowFields | None:
        """Return the fields of windows; None for tiles. Raises ConfigError."""
        return None if self.windows is None else WindowFields.of("train.windows", self.windows)

    def compiles(self) -> str:
        """Return auto, on or off, which YAML reads as true and false."""
        return {True: "on", False: "off"}[self.compile] if isinstance(self.compile, bool) else self.compile

    def check_best(self) -> None:
        """Raise ConfigError for an unknown score, or one that no validation computes; auto may be any number."""
        if self.best != "none" and self.best not in SCORES and not class_of(self.best):
            raise ConfigError(f"train.best is '{shown(self.best)}'; give none or {SCORE_WORDS}")
        if self.best != "none" and self.epochs != AUTO and self.validate_every > int(self.epochs):
            every = f"train.validate_every is {self.validate_every} and train.epochs {self.epochs}"
            refuse("train.best", self.best, f"{every}: nothing is ever validated", f"give at most {self.epochs}")

    @property
    def given_tiles(self) -> int | None:
        """Return the tiles of a step where they are given; None for whole images, or auto."""
        return None if isinstance(self.tiles_per_step, str) else self.tiles_per_step
