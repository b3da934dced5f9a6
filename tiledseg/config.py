"""What a run is told: one dataclass a group, every field also a flag and a YAML key.

A key appears here only once it works. Checks that need one group stand beside it and name the key to change; checks
that need the data or the network stand where these are known. The group `parallel` is in `config_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.config_checks import at_least, one_of
from tiledseg.config_parallel import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.widths import ACTIVATION_BYTES


@dataclass
class DataConfig:
    """Rasters to learn from.

    Args:
        images: paths, globs or URLs of the training images, or one HDF5 tile store
        labels: paths, globs or URLs of their labels, in the same order
        val_images: images to validate on
        val_labels: their labels
        classes: number of classes, or a map of raw value or colour to class (null: counts nowhere)
        ignore_index: class number of pixels that count nowhere
        nodata: value of image pixels without data (default: what the raster says)
        bands: band numbers to read, from 1 (default: all)
        references: open formats that read further files and URLs, such as VRT and WMS (docs/security.md)
        normalize: standardise each band by its mean and deviation over the training images
        workers: reading threads a rank
        prefetch: tiles read ahead a rank
    """

    images: str | list[str] = field(default_factory=list)
    labels: str | list[str] = field(default_factory=list)
    val_images: str | list[str] = field(default_factory=list)
    val_labels: str | list[str] = field(default_factory=list)
    classes: int | dict[str | int, int | None] = 2
    ignore_index: int = 255
    nodata: float | None = None
    bands: list[int] | None = None
    references: bool = False
    normalize: bool = True
    workers: int = 2
    prefetch: int = 2

    def check(self) -> None:
        if not self.images:
            raise ConfigError("data.images is empty; give at least one image")
        if bool(self.val_images) != bool(self.val_labels):
            raise ConfigError(
                f"data.val_images has {_count(self.val_images)} entries and data.val_labels {_count(self.val_labels)}; "
                "give both or neither"
            )
        if isinstance(self.classes, int) and not 2 <= self.classes <= 255:
            raise ConfigError(f"data.classes is {self.classes}; give 2 to 255 classes, or a map of raw value to class")
        if not 0 <= self.ignore_index <= 255:
            raise ConfigError(f"data.ignore_index is {self.ignore_index}; give a number from 0 to 255")
        if self.bands is not None and (not self.bands or min(self.bands) < 1 or len(set(self.bands)) < len(self.bands)):
            raise ConfigError(f"data.bands is {self.bands}; give different band numbers from 1 on")
        at_least("data.workers", self.workers, 1)
        at_least("data.prefetch", self.prefetch, 1)


def _count(paths: str | list[str]) -> int:
    return len([paths] if isinstance(paths, str) else paths) if paths else 0


@dataclass
class TilingConfig:
    """How rasters are cut.

    Args:
        grid: tiles along rows and columns: Q, [R, C], or auto (the fewest that memory and ranks allow)
        halo: pixels around a core, or auto (the smallest exact one)
    """

    grid: int | list[int] | str = "auto"
    halo: int | str = "auto"

    def check(self) -> None:
        self.grid_shape()
        self.halo_width()

    def grid_shape(self) -> tuple[int, int] | None:
        """(rows, cols), or None for auto."""
        if self.grid == "auto":
            return None
        if isinstance(self.grid, str):
            raise ConfigError(f"tiling.grid is '{self.grid}'; give auto, a number of at least 1, or [rows, cols]")
        values = self.grid if isinstance(self.grid, list) else [self.grid, self.grid]
        if len(values) != 2 or not all(isinstance(v, int) and v >= 1 for v in values):
            raise ConfigError(f"tiling.grid is {self.grid}; give auto, a number of at least 1, or [rows, cols]")
        return int(values[0]), int(values[1])

    def halo_width(self) -> int | None:
        """Pixels, or None for auto."""
        if self.halo == "auto":
            return None
        if not isinstance(self.halo, int) or self.halo < 0:
            raise ConfigError(f"tiling.halo is {self.halo}; give auto or a number of pixels from 0 on")
        return self.halo


@dataclass
class ModelConfig:
    """The network.

    Args:
        name: unet, or a preset of the paper: small, medium-2, large (they set levels, convs_per_level and norm)
        levels: levels of the U-Net, the bottom included
        convs_per_level: convolutions a level and side
        kernel: side of the square kernel, odd
        base_channels: channels of the first level; each level doubles them
        padding: same (padded) or valid (unpadded)
        norm: none, pixel, or batch, instance, group (these need parallel.exact=false where tiles are several)
        upsampling: transposed, nearest or bilinear
        dropout: probability to drop a channel
    """

    name: str = "unet"
    levels: int = 5
    convs_per_level: int = 2
    kernel: int = 3
    base_channels: int = 64
    padding: str = "same"
    norm: str = "none"
    upsampling: str = "transposed"
    dropout: float = 0.0


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate policy.

    Args:
        name: adamw or sgd
        lr: learning rate
        momentum: of sgd
        weight_decay: decoupled for adamw, L2 for sgd
        policy: constant, step, polynomial or cosine
        warmup_steps: steps over which the rate rises linearly from 0
        step_size: epochs between drops of the step policy
        gamma: factor of each drop of the step policy
        power: of the polynomial policy
        clip_norm: largest norm of the whole gradient; 0 does not clip
    """

    name: str = "adamw"
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    policy: str = "constant"
    warmup_steps: int = 0
    step_size: int = 20
    gamma: float = 0.1
    power: float = 0.9
    clip_norm: float = 0.0

    def check(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "sgd"))
        one_of("optimizer.policy", self.policy, ("constant", "step", "polynomial", "cosine"))
        if not self.lr > 0:
            raise ConfigError(f"optimizer.lr is {self.lr}; give a number above 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum is {self.momentum}; give a number in [0, 1)")
        for key in ("weight_decay", "warmup_steps", "clip_norm"):
            at_least(f"optimizer.{key}", getattr(self, key), 0)
        at_least("optimizer.step_size", self.step_size, 1)
        for key in ("gamma", "power"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"optimizer.{key} is {getattr(self, key)}; give a number above 0")


@dataclass
class TrainConfig:
    """The training loop.

    Args:
        epochs: passes over the training images
        tiles_per_step: the global batch in tiles, whatever the number of ranks (default: all tiles of whole images)
        images_per_step: the global batch in whole images, where tiles_per_step is not given
        precision: fp32, bf16 (autocast) or fp64
        seed: of weights, shuffling and dropout
        checkpoint_every: steps between checkpoints; one more is written at the end, or at a wall-time signal
        keep_checkpoints: how many to keep, the newest first
        validate_every: epochs between validations
        resume: auto (go on from the newest checkpoint of run.output), never, or the path of a checkpoint
        deterministic: use deterministic kernels only, no TF32
    """

    epochs: int = 1
    tiles_per_step: int | None = None
    images_per_step: int = 1
    precision: str = "fp32"
    seed: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    validate_every: int = 1
    resume: str = "auto"
    deterministic: bool = True

    def check(self) -> None:
        one_of("train.precision", self.precision, tuple(ACTIVATION_BYTES))
        for key in ("epochs", "images_per_step", "checkpoint_every", "keep_checkpoints", "validate_every"):
            at_least(f"train.{key}", getattr(self, key), 1)
        at_least("train.seed", self.seed, 0)
        if self.tiles_per_step is not None:
            at_least("train.tiles_per_step", self.tiles_per_step, 1)
            if self.images_per_step != 1:
                raise ConfigError(
                    f"train.tiles_per_step is {self.tiles_per_step} and train.images_per_step {self.images_per_step}; "
                    "give one of them"
                )


@dataclass
class RunConfig:
    """Where the run goes and what it says.

    Args:
        output: folder of the run
        verbosity: 0 silent, 1 progress, 2 a line a step
    """

    output: str = "runs/run"
    verbosity: int = 1

    def check(self) -> None:
        if not self.output:
            raise ConfigError("run.output is empty; give a folder")
        if self.verbosity not in (0, 1, 2):
            raise ConfigError(f"run.verbosity is {self.verbosity}; give 0, 1 or 2")


@dataclass
class Config:
    """A whole run.

    Args:
        data: rasters to learn from
        tiling: how they are cut
        model: the network
        parallel: how the work is spread
        optimizer: the optimizer and its policy
        train: the training loop
        run: where the run goes
    """

    data: DataConfig = field(default_factory=DataConfig)
    tiling: TilingConfig = field(default_factory=TilingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot be, before anything else is done."""
        for group in (self.data, self.tiling, self.parallel, self.optimizer, self.train, self.run):
            group.check()
        if self.train.tiles_per_step is not None and self.tiling.grid == "auto":
            raise ConfigError(
                f"train.tiles_per_step is {self.train.tiles_per_step} with tiling.grid auto: the batch would depend on "
                "the machine; give a grid, or leave tiles_per_step out"
            )
        if self.train.tiles_per_step is not None and self.parallel.halo != "read":
            raise ConfigError(
                f"train.tiles_per_step is {self.train.tiles_per_step}, but with parallel.halo {self.parallel.halo} "
                "neighbours share whole images; leave it out and use train.images_per_step, or use parallel.halo read"
            )
