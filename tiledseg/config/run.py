"""The configuration: one dataclass a group, every field also a flag and a YAML key.

Checks of one group stand beside it; checks of several stand in `Config`; checks that need the data or the network stand
where these are known. The groups `data`, `train`, `parallel` and `memory` have modules of their own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tiledseg.config.checks import (
    AUTO,
    LARGEST_HALO,
    MOST,
    Group,
    Need,
    conditional,
    number,
    refuse,
    rows_cols,
    shown,
    word,
)
from tiledseg.config.data import DataConfig
from tiledseg.config.parallel import NONE, MemoryConfig, ParallelConfig
from tiledseg.config.train import TrainConfig
from tiledseg.config.words import BLENDS, CONSTANT, ENCODERS, ENDS, NORMS, PADDINGS, UPSAMPLINGS, read_policy
from tiledseg.errors import ConfigError

GRID = "auto, a number of at least 1, or [rows, cols]"
LARGEST_GRID = 2**20  # tiles along a side


@dataclass
class TilingConfig(Group):
    """Tiles of rasters.

    Args:
        grid: tiles along rows and columns: Q, [R, C], or auto (the fewest that memory and ranks allow)
        halo: pixels around a core, or auto (the smallest exact one)
    """

    grid: int | list[int] | str = number(AUTO, 1, LARGEST_GRID, texts=(AUTO,), pair=True, remedy=GRID)
    halo: int | str = number(AUTO, 0, LARGEST_HALO, texts=(AUTO,), remedy="auto or a number of pixels from 0 on")

    def grid_shape(self) -> tuple[int, int] | None:
        """Return (rows, cols), or None for auto."""
        return rows_cols(self.grid)

    def halo_width(self) -> int | None:
        """Return pixels, or None for auto."""
        return None if isinstance(self.halo, str) else self.halo


CROPS = ("window", "overlap", "blend", "ends")
"""Keys of `model` for a module that is not traced."""
_CROPS = Need("window", "the size of a crop", lambda model: model.window is not None)


@dataclass
class ModelConfig(Group):
    """The network.

    Args:
        name: unet, segnet, residual_unet, gated_scnn, or a preset of the paper: small, medium-2, large (U-Nets that set
            levels, convs_per_level and norm); other keys than those of docs/reference/networks.md are refused
        levels: levels of a U-Net, the bottom included; poolings of SegNet, 5 at most
        convs_per_level: convolutions a level and side
        kernel: side of the square kernel, odd
        base_channels: channels of the first level; each level doubles them
        padding: same (padded) or valid (unpadded)
        norm: none, pixel, or instance, group, batch, which see the whole image: with several tiles they need
            parallel.halo layer; auto: none in a U-Net, batch in the other networks
        upsampling: transposed, nearest or bilinear; auto: transposed in a U-Net, nearest in a residual one
        dropout: probability to drop a channel
        freeze_norm: keep the running statistics of batch norms constant in training too (docs/how-to/fine-tune.md)
        encoder: resnet18, resnet34 or resnet50; of gated_scnn wide38 too; auto: resnet34, and wide38 there
        pretrained: a file of published weights to begin the encoder with (docs/reference/networks.md)
        build: a network of your own: package.module:function, which gets bands, classes and `arguments`, and returns a
            torch.nn.Module (docs/how-to/own-network.md)
        arguments: further arguments of the function, by name; or fields of gated_scnn, {image_mean: true (the pyramid
            takes the mean of the whole image too), edge_band: false (the last band is edges, computed before)}
        series: number of times, for a module of (batch, channels, times, height, width); the first bands are those of
            the first time (docs/how-to/own-network.md)
        verify: compare the traced graph with the module itself before the first step
        window: side in pixels of the one image size that the module of `build` takes. It is not traced: it trains on
            windows and maps by blended crops (docs/how-to/maps.md)
        overlap: part of a crop's side that it shares with the next one, from 0 to below 1
        blend: weight of a pixel by its place in a crop: gaussian, cosine, mean, or centre (of the nearest crop alone)
        ends: inside (the last crop is shifted into the image) or mirrored (crops reach half an overlap beyond it)
    """

    name: str = conditional("unet", Need("build", "null", lambda model: model.build is None))
    levels: int = number(5, 1, 12)
    convs_per_level: int = number(2, 1, 64)
    kernel: int = number(3, 1, 1023)
    base_channels: int = number(64, 1, 2**20)
    padding: str = word("same", *PADDINGS)
    norm: str = word(AUTO, AUTO, *NORMS)
    upsampling: str = word(AUTO, AUTO, *UPSAMPLINGS)
    dropout: float = number(0.0, 0.0, 1.0, below=True)
    freeze_norm: bool = conditional(False, Need("window", "null", lambda model: model.window is None))
    encoder: str = word(AUTO, AUTO, *ENCODERS)
    pretrained: str | None = None
    build: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    series: int | None = number(None, 2, 4096, need=Need("build", "a function", lambda model: model.build))
    verify: bool = True
    window: int | None = number(None, 1, LARGEST_HALO)
    overlap: float = number(0.5, 0.0, 1.0, below=True, need=_CROPS)
    blend: str = word("gaussian", *BLENDS, need=_CROPS)
    ends: str = word("inside", *ENDS, need=_CROPS)


@dataclass
class OptimizerConfig(Group):
    """The optimizer and its learning-rate policy.

    Args:
        name: adamw or sgd
        lr: learning rate
        scale_lr: none, or linear: multiply lr by the windows, tiles or images of a step (docs/how-to/fine-tune.md)
        lr_factors: a map of name pattern to factor of the rate (0 freezes), as {"encoder*": 0.1}; the first fit counts
        momentum: momentum of sgd
        weight_decay: decoupled for adamw, L2 for sgd
        decay_norms: let weights of norms, and biases, decay too
        policy: constant, step, polynomial or cosine; with fields {name: step, size: 20, gamma: 0.1} (the rate drops by
            the factor gamma every size epochs) or {name: polynomial, power: 0.9}
        warmup_steps: steps over which the rate rises linearly from 0
        clip_norm: largest norm of the whole gradient; 0 does not clip
    """

    name: str = word("adamw", "adamw", "sgd")
    lr: float = number(1e-3, 0.0, 1e6, above=True)
    scale_lr: str = word("none", "none", "linear")
    lr_factors: dict[str, float] = number({}, 0.0, 1e6)
    momentum: float = number(0.9, 0.0, 1.0, below=True, need=Need("name", "sgd", lambda each: each.name == "sgd"))
    weight_decay: float = number(0.0, 0.0, 1e6)
    decay_norms: bool = conditional(True, Need("weight_decay", "above 0", lambda each: each.weight_decay > 0))
    policy: str | dict[str, Any] = CONSTANT
    warmup_steps: int = number(0, 0, MOST)
    clip_norm: float = number(0.0, 0.0, 1e15)

    def check_together(self) -> None:
        read_policy(self.policy)


@dataclass
class RunConfig(Group):
    """Folder and messages of the run.

    Args:
        output: folder of the run
        verbosity: 0 silent, 1 progress, 2 a line a step
    """

    output: str = "runs/run"
    verbosity: int = number(1, 0, 2, remedy="0, 1 or 2")

    def check_together(self) -> None:
        if not self.output:
            raise ConfigError("run.output is empty; give a folder")


@dataclass
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    tiling: TilingConfig = field(default_factory=TilingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot be, before anything else is done."""
        for name, group in vars(self).items():
            if not isinstance(group, Group):
                raise ConfigError(f"{name} is {shown(group)}; give a {name.capitalize()}Config, or leave it out")
            group.check()
        self._check_windows()
        memory, parallel = self.memory, self.parallel
        whole = parallel.halo == "exchange" or parallel.stages > 1 or parallel.fusion_depth() != 1 or parallel.overlap
        if memory.in_file and whole and not (memory.in_blocks or memory.offload != NONE):
            why = "with exchange, stages, fusion or overlap no blocks are computed: nothing would be stored there"
            refuse("memory.store", memory.store, why, "leave store out, or give memory.offload")
        halo = f"with parallel.halo {parallel.halo} neighbours share images"
        if self.train.augment_each == "tile" and parallel.shares_images:
            refuse("train.augment_each", "tile", halo, "use image, or parallel.halo read")
        if self.train.given_tiles is not None and self.tiling.grid == AUTO:
            machine = "tiling.grid is auto: the batch would depend on the machine"
            refuse("train.tiles_per_step", self.train.tiles_per_step, machine, "give a grid, or leave it out")
        if self.train.given_tiles is not None and parallel.shares_images:
            remedy = "leave it out and use train.images_per_step, or use parallel.halo read"
            refuse("train.tiles_per_step", self.train.tiles_per_step, halo, remedy)

    def record(self) -> dict[str, Any]:
        """Return every key as JSON has it."""
        return json.loads(json.dumps(asdict(self)))

    def _check_windows(self) -> None:
        """Refuse windows where ranks share images, except small images in mode `layer` without stages."""
        parallel, windows, size = self.parallel, self.train.drawn(), self.model.window
        small = windows is not None and windows.halo == NONE
        if size is not None and not (small and windows and windows.size == size):
            whole = "the module takes that size alone, and is trained on windows of it, each an image of its own"
            refuse("model.window", size, whole, f"give train.windows {{size: {size}, per_step: N, halo: none}}")
        shared = small and parallel.shares_layers and parallel.stages == 1
        if windows is not None and parallel.shares_images and not shared:
            halo = f"train.windows has halo {windows.halo}"
            refuse(
                "parallel.halo", parallel.halo, halo, "use parallel.halo read (layer takes small ones, without stages)"
            )
