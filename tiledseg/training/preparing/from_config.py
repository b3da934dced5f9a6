"""What the configuration says, as the values that plan, recipe and rasters are made of."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.network import Network
from tiledseg.config.data import IMAGENET, DataConfig
from tiledseg.config.memory import recompute_of
from tiledseg.config.run import Config, OptimizerConfig
from tiledseg.config.train import MEDIAN_FREQUENCY, TrainConfig
from tiledseg.config.words import read_policy
from tiledseg.errors import ConfigError
from tiledseg.geometry.memory_words import USUAL_LOSS, LossBytes
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.question import Windows
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import LabelReading, PairReading
from tiledseg.raster.samples.content import ByContent
from tiledseg.training.losses.choose_objective import choose_objective, further_bytes
from tiledseg.training.losses.objective import Objective
from tiledseg.training.recipe import Cadence, Judge, Rate, Recipe, Update

_TRAINING, _VALIDATION = ("images", "labels"), ("val_images", "val_labels")


if TYPE_CHECKING:
    from tiledseg.planning.memory.store import Store


def reading_of(data: DataConfig, label_map: LabelMap | None) -> PairReading:
    labels = LabelReading(
        label_map, data.references, data.label_layer, data.label_attribute, data.background, data.warp
    )
    return PairReading(data.bands, data.nodata, data.references, labels, data.warp_images)


def windows_of(train: TrainConfig) -> Windows | None:
    """What is trained on in place of tiles."""
    if train.window is None or train.windows_per_step is None:
        return None
    return Windows(train.window, train.windows_per_step, train.window_halo == "exact")


def recipe_of(config: Config, judge: Judge | None = None) -> Recipe:
    """What a run with this configuration is told beside its plan; `judge`: of its validations."""
    data, train, run = config.data, config.train, config.run
    asked = ByContent(train.skip_empty, train.balance_classes)
    by_content = asked if asked.skip_empty or asked.balance else None
    return Recipe(
        config.model.name,
        Path(run.output),
        run.verbosity,
        run.panels,
        train.resume,
        train.seed,
        train.precision,
        train.deterministic,
        config.model.pretrained,
        config.model.freeze_norm,
        data.normalize is not False,
        data.normalize == IMAGENET,
        train.class_weights == MEDIAN_FREQUENCY,
        by_content,
        train.ema,
        data.workers,
        data.prefetch,
        _cadence(train, judge or Judge()),
        update_of(config.optimizer),
        rate_of(config.optimizer, train.windows_per_step or train.given_tiles or train.images_per_step),
        record_of(config),
        store=config.memory.store,
        recompute=recompute_of(config.memory, config.parallel).nodes,
        compiles=train.compiles() == "on",  # auto: nowhere yet, since no GPU has measured it
        verify=config.model.verify,
    )


def record_of(config: Config) -> dict[str, Any]:
    """Every key as JSON has it."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return record


def _cadence(train: TrainConfig, judge: Judge) -> Cadence:
    kept = train.checkpoint_every, train.keep_checkpoints
    assert isinstance(train.epochs, int), "auto is settled by then"
    return Cadence(train.epochs, train.validate_every, *kept, judge, train.largest_loss)


def blocks_asked(config: Config, store: Store | None) -> BlocksAsked | None:
    """What the group `memory` says of blocks; None where tiles are computed whole. `store`: the rates of a file."""
    memory, in_file = config.memory, config.memory.in_file
    if memory.in_blocks:
        return BlocksAsked(memory.blocks_shape(), in_file, store=store)
    compiles = config.train.compiles() == "on"  # which does not go with blocks
    return BlocksAsked(None, in_file, True, store) if memory.may_block and not compiles else None


def objective_of(config: Config, network: Network, label_map: LabelMap, weights: tuple[float, ...]) -> Objective:
    """What the network is trained for. Weights that are still to be counted stand as 1, so that all is refused now."""
    counted = config.train.class_weights == MEDIAN_FREQUENCY
    stand_in = (1.0,) * label_map.count if counted else weights
    return choose_objective(network, config.train.loss, label_map.ignore_index, stand_in)


def loss_bytes_of(config: Config, network: Network, label_map: LabelMap, objective: Objective) -> LossBytes:
    """What the loss needs beyond the network's usual one, without weights of classes."""
    usual = choose_objective(network, TrainConfig().loss, label_map.ignore_index)
    if objective == usual:
        return USUAL_LOSS
    graph = network.graph()
    channels = tensor_channels(graph, network.bands)
    outputs = [channels[tensor] for tensor in graph.results]
    return further_bytes(objective, usual, outputs, config.train.precision)


def update_of(optimizer: OptimizerConfig) -> Update:
    return Update(**{key: getattr(optimizer, key) for key in Update.__dataclass_fields__})


def rate_of(optimizer: OptimizerConfig, batch: int = 1) -> Rate:
    """`batch`: tiles, windows or images of a step, on all ranks together, by which a linear rate grows."""
    name, fields = read_policy(optimizer.policy)
    rate = Rate(optimizer.lr, name, optimizer.warmup_steps, **fields)
    return replace(rate, lr=rate.lr * batch) if optimizer.scale_lr == "linear" else rate


def label_map_of(data: DataConfig) -> LabelMap:
    """What the labels of a configuration mean. Raises ConfigError."""
    if isinstance(data.classes, str):
        raise ConfigError(f"data.classes is the file {data.classes}; give what user_files.classes makes of it")
    return LabelMap.from_config(data.classes, data.ignore_index)  # type: ignore[arg-type]
