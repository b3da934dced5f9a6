"""What a run is told: one dataclass a group, every field also a flag and a YAML key.

A key appears here only once it works. Checks that need one group stand beside it and name the key to change; checks
that need the data or the network stand where these are known. The group `parallel` is in `config_parallel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from tiledseg.augmentation import EACH, augmentation
from tiledseg.config_best import check_best
from tiledseg.config_checks import MOST, check_values, number, one_of, shown
from tiledseg.config_loss import check_loss
from tiledseg.config_parallel import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.widths import ACTIVATION_BYTES

AUTO, IMAGENET, MEDIAN_FREQUENCY = "auto", "imagenet", "median_frequency"
ClassEntry = str | int | bool | None | list[str | int | None]
"""What a class's record holds, text first. Of Any the parser would make YAML, where '#ff0000' is a comment: null."""
CLASSES = "2 to 255 classes, a map of raw value to class, a list of records {name, colour, values}, or a file of them"
GRID = "auto, a number of at least 1, or [rows, cols]"
LARGEST_GRID, LARGEST_HALO = 2**20, 2**20  # tiles along a side, pixels


@dataclass
class DataConfig:
    """Rasters to learn from.

    Args:
        images: paths, folders, globs or URLs of the training images, a list of them (.txt, .csv, .geojson), or one HDF5
            tile store (docs/own-data.md)
        labels: the same of their labels, in the same order; or a pattern such as labels/{stem}_L.png; or polygons
            (.gpkg, .geojson, .shp, .fgb)
        val_images: images to validate on
        val_labels: their labels
        classes: number of classes; or a map of raw value or colour to class (null: counts nowhere); or a list of
            {name, colour, values}; or a file of classes, such as label_colors.txt (docs/own-data.md)
        label_layer: of labels that are polygons: the layer (default: the file's only one)
        label_attribute: of labels that are polygons: what tells their class, by its values or the classes' names
            (default: there is but one class)
        background: of labels that are polygons: the class of pixels in none, by name or number; ignored: they count
            nowhere
        warp: bring labels of another grid, or CRS, to the image's: the nearest pixel
        area: polygons (.gpkg, .geojson, .shp, .fgb): pixels outside count nowhere, in training and validation
        split: blocks of each image along rows and columns, [R, C]: some are validated on, the others trained on
        split_share: of all blocks, to validate on
        split_gap: pixels around a block that is validated on which count nowhere; auto: the network's halo
        split_seed: which blocks are validated on
        ignore_index: class number of pixels that count nowhere
        nodata: value of image pixels without data (default: what the raster says)
        bands: band numbers to read, from 1 (default: all)
        references: open formats that read further files and URLs, such as VRT and WMS (docs/security.md)
        normalize: standardise each band by its mean and deviation over the training images; imagenet: the first three,
            red, green and blue of 8 bits, by those that published encoders were trained with
        workers: reading threads a rank
        prefetch: tiles read ahead a rank
    """

    images: str | list[str] = field(default_factory=list)
    labels: str | list[str] = field(default_factory=list)
    val_images: str | list[str] = field(default_factory=list)
    val_labels: str | list[str] = field(default_factory=list)
    classes: int | dict[str | int, ClassEntry | dict[str, ClassEntry]] | list[dict[str, ClassEntry]] | str = number(
        2, 0, 255, remedy=CLASSES
    )
    label_layer: str | None = None
    label_attribute: str | None = None
    background: str | int | None = number(None, 0, 254)
    warp: bool = False
    area: str | None = None
    split: list[int] | None = number(None, 1, 4096, remedy="[R, C], blocks along rows and columns")
    split_share: float = number(0.2, 0.0, 1.0, above=True, below=True)
    split_gap: int | str = number("auto", 0, LARGEST_HALO, remedy="auto or a number of pixels from 0 on")
    split_seed: int = number(0, 0, 2**63 - 1)
    ignore_index: int = number(255, 0, 255, remedy="a number from 0 to 255")
    nodata: float | None = number(None, -math.inf, math.inf, nan=True)
    bands: list[int] | None = number(None, 1, 65535, remedy="different band numbers from 1 on")
    references: bool = False
    normalize: bool | str = True
    workers: int = number(2, 1, 256)
    prefetch: int = number(2, 1, 4096)

    def check(self) -> None:
        check_values("data", self)
        if not self.images:
            raise ConfigError("data.images is empty; give at least one image")
        if bool(self.val_images) != bool(self.val_labels) and not _lists(self.val_images):
            raise ConfigError(
                f"data.val_images has {_count(self.val_images)} entries and data.val_labels {_count(self.val_labels)}; "
                "give both or neither"
            )
        if isinstance(self.classes, (int, float)) and not (type(self.classes) is int and 2 <= self.classes <= 255):
            raise ConfigError(f"data.classes is {shown(self.classes)}; give {CLASSES}")
        self._check_split()
        if isinstance(self.normalize, str):
            one_of("data.normalize", self.normalize, ("true", "false", IMAGENET))
        if self.bands is not None and (not self.bands or len(set(self.bands)) < len(self.bands)):
            raise ConfigError(f"data.bands is {self.bands}; give different band numbers from 1 on")

    def _check_split(self) -> None:
        if isinstance(self.split_gap, str) and self.split_gap != AUTO:
            raise ConfigError(f"data.split_gap is '{shown(self.split_gap)}'; give auto or a number of pixels from 0 on")
        if self.split is None:
            plain = DataConfig()
            for key in ("split_share", "split_gap", "split_seed"):
                if getattr(self, key) != getattr(plain, key):
                    raise ConfigError(f"data.{key} is {getattr(self, key)}, but data.split is null; give its blocks")
            return
        if len(self.split) != 2:
            raise ConfigError(f"data.split is {self.split}; give [R, C], blocks along rows and columns")
        if self.val_images:
            raise ConfigError("data.split and data.val_images are both given; validate on blocks, or on other images")


def _lists(paths: str | list[str]) -> bool:
    """Whether all are files that may name labels too."""
    every = [paths] if isinstance(paths, str) else paths
    return bool(every) and all(path.lower().endswith((".txt", ".csv", ".geojson", ".json")) for path in every)


def _count(paths: str | list[str]) -> int:
    return len([paths] if isinstance(paths, str) else paths) if paths else 0


@dataclass
class TilingConfig:
    """How rasters are cut.

    Args:
        grid: tiles along rows and columns: Q, [R, C], or auto (the fewest that memory and ranks allow)
        halo: pixels around a core, or auto (the smallest exact one)
    """

    grid: int | list[int] | str = number("auto", 1, LARGEST_GRID, remedy=GRID)
    halo: int | str = number("auto", 0, LARGEST_HALO, remedy="auto or a number of pixels from 0 on")

    def check(self) -> None:
        check_values("tiling", self)
        self.grid_shape()
        self.halo_width()

    def grid_shape(self) -> tuple[int, int] | None:
        """(rows, cols), or None for auto."""
        if self.grid == "auto":
            return None
        if isinstance(self.grid, str):
            raise ConfigError(f"tiling.grid is '{shown(self.grid)}'; give {GRID}")
        values = self.grid if isinstance(self.grid, list) else [self.grid, self.grid]
        if len(values) != 2:
            raise ConfigError(f"tiling.grid is {shown(self.grid)}; give {GRID}")
        return values[0], values[1]

    def halo_width(self) -> int | None:
        """Pixels, or None for auto."""
        if self.halo == "auto":
            return None
        if isinstance(self.halo, str):
            raise ConfigError(f"tiling.halo is '{shown(self.halo)}'; give auto or a number of pixels from 0 on")
        return self.halo


@dataclass
class ModelConfig:
    """The network.

    Args:
        name: unet, segnet, residual_unet, gated_scnn, or a preset of the paper: small, medium-2, large (U-Nets that set
            levels, convs_per_level and norm); each has the keys that docs/networks.md names, and others are refused
        levels: levels of a U-Net, the bottom included; poolings of SegNet, 5 at most
        convs_per_level: convolutions a level and side
        kernel: side of the square kernel, odd
        base_channels: channels of the first level; each level doubles them
        padding: same (padded) or valid (unpadded)
        norm: none, pixel, or batch, instance, group (these need parallel.exact=false where tiles are several); auto:
            none in a U-Net, batch in the other networks
        upsampling: transposed, nearest or bilinear; auto: transposed in a U-Net, nearest in a residual one
        dropout: probability to drop a channel
        freeze_norm: running statistics of batch norms are constants, in training too (docs/transfer.md)
        encoder: resnet18, resnet34 or resnet50; of gated_scnn wide38 too; auto: resnet34, and wide38 there
        pretrained: a file of published weights to begin the encoder with, torch's or safetensors (docs/networks.md)
        image_mean: whether the pyramid of gated_scnn takes the mean of the whole image too
        edge_band: whether the last band is edges, for gated_scnn, made before
        build: a network of your own: package.module:function, which is imported, called with bands, classes and
            `arguments`, and returns a torch.nn.Module (docs/own-network.md)
        arguments: names and values that the function is called with besides
    """

    name: str = "unet"
    levels: int = number(5, 1, 12)
    convs_per_level: int = number(2, 1, 64)
    kernel: int = number(3, 1, 1023)
    base_channels: int = number(64, 1, 2**20)
    padding: str = "same"
    norm: str = AUTO
    upsampling: str = AUTO
    dropout: float = number(0.0, 0.0, 1.0, below=True)
    freeze_norm: bool = False
    encoder: str = AUTO
    pretrained: str | None = None
    image_mean: bool = True
    edge_band: bool = False
    build: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        check_values("model", self)
        if self.arguments and self.build is None:
            raise ConfigError(
                f"model.arguments is {shown(self.arguments)}, but model.build names no function; name one"
            )


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate policy.

    Args:
        name: adamw or sgd
        lr: learning rate
        scale_lr: none, or linear: the rate is lr times the tiles, or else the images, of a step (docs/transfer.md)
        lr_factors: a map of name pattern to factor of the rate (0 freezes), as {"encoder*": 0.1}; the first that fits
        momentum: of sgd
        weight_decay: decoupled for adamw, L2 for sgd
        decay_norms: whether weights of norms, and biases, decay too
        policy: constant, step, polynomial or cosine
        warmup_steps: steps over which the rate rises linearly from 0
        step_size: epochs between drops of the step policy
        gamma: factor of each drop of the step policy
        power: of the polynomial policy
        clip_norm: largest norm of the whole gradient; 0 does not clip
    """

    name: str = "adamw"
    lr: float = number(1e-3, 0.0, 1e6, above=True)
    scale_lr: str = "none"
    lr_factors: dict[str, float] = number({}, 0.0, 1e6)
    momentum: float = number(0.9, 0.0, 1.0, below=True)
    weight_decay: float = number(0.0, 0.0, 1e6)
    decay_norms: bool = True
    policy: str = "constant"
    warmup_steps: int = number(0, 0, MOST)
    step_size: int = number(20, 1, MOST)
    gamma: float = number(0.1, 0.0, 1.0, above=True)
    power: float = number(0.9, 0.0, 1e3, above=True)
    clip_norm: float = number(0.0, 0.0, 1e15)

    def check(self) -> None:
        check_values("optimizer", self)
        one_of("optimizer.name", self.name, ("adamw", "sgd"))
        one_of("optimizer.scale_lr", self.scale_lr, ("none", "linear"))
        one_of("optimizer.policy", self.policy, ("constant", "step", "polynomial", "cosine"))


@dataclass
class TrainConfig:
    """The training loop.

    Args:
        epochs: passes over the training images
        tiles_per_step: the global batch in tiles, whatever the number of ranks (default: all tiles of whole images)
        images_per_step: the global batch in whole images, where tiles_per_step is not given
        loss: cross_entropy, focal, dice, tversky, or a map of some to how much each counts, as
            {cross_entropy: 1, dice: 1} (docs/training.md)
        focal_gamma: power of the focal loss; 0 makes it the cross-entropy
        tversky_alpha: what a pixel wrongly in a class weighs in the Tversky loss
        tversky_beta: what one wrongly not in it weighs
        label_smoothing: share of each label that the cross-entropy spreads evenly over all classes
        ema: decay of an average of the weights, with which the run validates and maps; 0: none
        best: none, or the score whose best validation is kept (checkpoints/best): mean_iou, mean_f1, accuracy, loss or
            iou.CLASS
        early_stop: epochs without a better score after which the run ends (default: never)
        class_weights: none, median_frequency (the median of all classes' frequencies over the class's own), a list of
            one weight a class, or a map of class to weight, 1 for others (docs/training.md)
        tiles_per_batch: tiles of one shape that run as one batch, at most; auto: as many as fit and pay (docs/plan.md)
        precision: fp32, bf16 (autocast) or fp64
        seed: of weights, shuffling and dropout
        checkpoint_every: steps between checkpoints; one more is written at the end, or at a wall-time signal
        keep_checkpoints: how many to keep, the newest first
        validate_every: epochs between validations
        resume: auto (go on from the newest checkpoint of run.output), never, or the path of a checkpoint
        deterministic: use deterministic kernels only, no TF32
        edge_weight: of the loss of edges, for networks that give some (docs/networks.md)
        edge_balance: of an edge pixel in it; another pixel counts the rest
        edge_radius: pixels within which another class makes an edge of a pixel
        attention_weight: of the classes' loss, once more, where the network is sure of an edge
        dual_weight: of the difference between the edges of the classes' probabilities and of the labels
        sampling: tiles, each once an epoch, or windows, drawn anywhere in the images (docs/augmentation.md)
        window: side of a window in pixels
        windows_per_step: the global batch in windows, whatever the number of ranks
        window_halo: exact, or none (each window is a small image of its own)
        skip_empty: leave out tiles, or places of windows, without a label that counts
        balance_classes: share of the tiles or windows that are drawn by class, each class as often as any other
        augment: how training images are changed, drawn anew each epoch: a list of reflect, turn, translate, scale,
            brightness, contrast, noise, drop_bands, with their values (docs/augmentation.md)
        augment_each: what has a draw of its own: image, or tile (with parallel.halo read)
    """

    epochs: int = number(1, 1, MOST)
    tiles_per_step: int | None = number(None, 1, MOST)
    images_per_step: int = number(1, 1, MOST)
    loss: str | dict[str, float] = number("cross_entropy", 0.0, 1e6, above=True)
    focal_gamma: float = number(2.0, 0.0, 100.0)
    tversky_alpha: float = number(0.3, 0.0, 1e3)
    tversky_beta: float = number(0.7, 0.0, 1e3, above=True)
    label_smoothing: float = number(0.0, 0.0, 1.0, below=True)
    ema: float = number(0.0, 0.0, 1.0, below=True)
    best: str = "none"
    early_stop: int | None = number(None, 1, MOST)
    class_weights: str | list[float] | dict[str | int, float] = number("none", 0.0, 1e6)
    tiles_per_batch: int | str = number(AUTO, 1, MOST, remedy="auto or a number of tiles from 1 on")
    precision: str = "fp32"
    seed: int = number(0, 0, 2**63 - 1)
    checkpoint_every: int = number(100, 1, MOST)
    keep_checkpoints: int = number(3, 1, MOST)
    validate_every: int = number(1, 1, MOST)
    resume: str = "auto"
    deterministic: bool = True
    edge_weight: float = number(20.0, 0.0, 1e6)
    edge_balance: float = number(0.9, 0.0, 1.0)
    edge_radius: int = number(2, 1, 64)
    attention_weight: float = number(1.0, 0.0, 1e6)
    dual_weight: float = number(1.0, 0.0, 1e6)
    sampling: str = "tiles"
    window: int | None = number(None, 1, LARGEST_HALO)
    windows_per_step: int | None = number(None, 1, MOST)
    window_halo: str = "exact"
    skip_empty: bool = False
    balance_classes: float = number(0.0, 0.0, 1.0)
    augment: list[str | dict[str, Any]] = field(default_factory=list)
    augment_each: str = "image"

    def check(self) -> None:
        check_values("train", self)
        augmentation(self.augment)
        one_of("train.augment_each", self.augment_each, EACH)
        one_of("train.sampling", self.sampling, ("tiles", "windows"))
        one_of("train.window_halo", self.window_halo, ("exact", "none"))
        self._check_windows()
        one_of("train.precision", self.precision, tuple(ACTIVATION_BYTES))
        check_loss({key.name: (getattr(self, key.name), key.default) for key in fields(self)})
        if isinstance(self.class_weights, str):
            one_of("train.class_weights", self.class_weights, ("none", MEDIAN_FREQUENCY))
        self.batch()
        if self.tiles_per_step is not None and self.images_per_step != 1:
            raise ConfigError(
                f"train.tiles_per_step is {self.tiles_per_step} and train.images_per_step {self.images_per_step}; "
                "give one of them"
            )

    def batch(self) -> int | None:
        """Tiles of a batch, or None for auto."""
        if isinstance(self.tiles_per_batch, int):
            return self.tiles_per_batch
        one_of("train.tiles_per_batch", self.tiles_per_batch, (AUTO, "a number of tiles from 1 on"))
        return None

    def _check_windows(self) -> None:
        drawn = self.sampling == "windows"
        if (self.skip_empty or self.balance_classes) and self.tiles_per_step is None and not drawn:
            key = "skip_empty is true" if self.skip_empty else f"balance_classes is {self.balance_classes}"
            raise ConfigError(
                f"train.{key}, but a step takes whole images; give train.tiles_per_step, or train.sampling windows"
            )
        given = {"window": self.window, "windows_per_step": self.windows_per_step}
        for key, value in given.items():
            if drawn != (value is not None):
                remedy = f"give train.{key}" if drawn else "leave it out, or give train.sampling windows"
                raise ConfigError(f"train.sampling is {self.sampling} and train.{key} {value or 'not given'}; {remedy}")
        if not drawn and self.window_halo != "exact":
            raise ConfigError("train.window_halo is none and train.sampling tiles; give train.sampling windows")
        others = {"tiles_per_step": None, "images_per_step": 1, "augment_each": "image"}
        for key, default in others.items():
            if drawn and getattr(self, key) != default:
                raise ConfigError(
                    f"train.{key} is {getattr(self, key)} and train.sampling windows, which have windows_per_step, "
                    "and a draw each; leave it out"
                )


@dataclass
class RunConfig:
    """Where the run goes and what it says.

    Args:
        output: folder of the run
        verbosity: 0 silent, 1 progress, 2 a line a step
        panels: places of the validation images that are drawn at each validation; 0 draws none
    """

    output: str = "runs/run"
    verbosity: int = number(1, 0, 2, remedy="0, 1 or 2")
    panels: int = number(4, 0, 64)

    def check(self) -> None:
        check_values("run", self)
        if not self.output:
            raise ConfigError("run.output is empty; give a folder")


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
        for group in (self.data, self.tiling, self.model, self.parallel, self.optimizer, self.train, self.run):
            group.check()
        check_best(self.train.best, self.train.early_stop, bool(self.data.val_images))
        self._check_windows()
        if self.train.augment_each == "tile" and self.parallel.shares_images:
            raise ConfigError(
                f"train.augment_each is tile, but with parallel.halo {self.parallel.halo} neighbours share images; use "
                "image, or parallel.halo read"
            )
        if self.train.tiles_per_step is not None and self.tiling.grid == "auto":
            raise ConfigError(
                f"train.tiles_per_step is {self.train.tiles_per_step} with tiling.grid auto: the batch would depend on "
                "the machine; give a grid, or leave tiles_per_step out"
            )
        if self.train.tiles_per_step is not None and self.parallel.shares_images:
            raise ConfigError(
                f"train.tiles_per_step is {self.train.tiles_per_step}, but with parallel.halo {self.parallel.halo} "
                "neighbours share whole images; leave it out and use train.images_per_step, or use parallel.halo read"
            )

    def _check_windows(self) -> None:
        """Windows with halos are dealt to ranks; those that are images may be shared in `layer`, where a batch norm
        takes all of a step."""
        parallel, exact = self.parallel, self.train.window_halo == "exact"
        if self.train.sampling != "windows" or parallel.halo == "read":
            return
        if exact or parallel.halo == "exchange" or parallel.stages > 1:
            remedy = "read" if exact or parallel.halo == "exchange" else "read, or no stages"
            stages = f" and parallel.stages {parallel.stages}" if parallel.stages > 1 else ""
            raise ConfigError(
                f"parallel.halo is {parallel.halo}{stages} and train.sampling windows with train.window_halo "
                f"{self.train.window_halo}; use parallel.halo {remedy}"
            )
