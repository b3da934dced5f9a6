"""The checks and the plan of a run before it starts. One rank reads the headers of the files and sends the result to
the others; nothing is written and no pixel is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import build_network
from tiledseg.checkpoint.folder import Checkpoint
from tiledseg.checkpoint.saved_state import Best, Origin, Resumed, Source
from tiledseg.config.parallel import ALL, AUTO
from tiledseg.config.run import Config, OptimizerConfig
from tiledseg.config.train import MEDIAN_FREQUENCY, TrainConfig
from tiledseg.config.words import Augmentation, augmentation, class_of
from tiledseg.errors import ConfigError, explained
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.shapes import count_parameters
from tiledseg.models.frozen import freeze, frozen_nodes
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.grid import usual_grids
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion, WindowSteps
from tiledseg.planning.run.spread import measuring, parallelism
from tiledseg.planning.walk.cost_model import ASSUMED, ASSUMED_STORE, Store, disk_of, store_of
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.content import ByContent
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.sampling import DrawnWindows, Sampler, Steps
from tiledseg.raster.statistics import Normalization
from tiledseg.tracing.build import known, network_modules
from tiledseg.training.choose_objective import choose_objective, given_weights, loss_bytes_of
from tiledseg.training.optimizer import parameter_groups
from tiledseg.training.raster_set import RasterSet, inspect_files, layout_notes, split_of
from tiledseg.units import ACTIVATION_BYTES, wide_bytes
from tiledseg.user_files.machine import SOME_CPU, find_machine, machine_of

Kept = tuple[Sequence[int], ...]
"""The numbers of each image's tiles in which pixels may count."""
USUAL_BATCH, USUAL_STEPS = 4, 500
"""Default tiles of a step, and default fewest steps of a run."""


class Preparation:
    """A run before its first step: checked and planned by the root, sent to all ranks, and completed step by step.

    `user_config`: the configuration of the user. `config`: the same with epochs, tiles of a step and the learning rate
    as numbers. `class_weights`: empty if all are 1, or not yet counted. `files`: every file of the rasters. `chosen`:
    True if grid and steps are the program's defaults. `compiles`: True if passes with gradients are compiled.
    `counts_classes`: True if class weights are counted in the labels. `by_content`: the rules for drawing tiles or
    windows by their labels; None if labels do not matter.

    Where it begins (`resuming`): `checkpoint`: None for a new run. `sources`: the images as they are now; `added`: the
    numbers of those that the checkpoint does not have. `resumed`: all resumptions with changes, this one last. `best`:
    the best validation so far. `pretrained`: the file of a new run's `first_weights`, by name. `normalization`: the
    checkpoint's, or measured (`start`).
    """

    checkpoint: Checkpoint | None = None
    sources: tuple[Source, ...] = ()
    added: tuple[int, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    best: Best | None = None
    pretrained: Origin | None = None
    normalization: Normalization | None = None

    def __init__(self, config: Config, memory_bytes: int, ranks: int, on_cpu: bool = True) -> None:
        """Check a configuration against the files that it names, and plan the run on them.

        `memory_bytes`: for one rank of `ranks`, on CPUs if `on_cpu`. These change speed and memory only. Raises
        InputError for the first fault.
        """
        config.check()
        data, train = config.data, config.train
        if isinstance(data.classes, str):
            raise ConfigError(f"data.classes is the file {data.classes}; give its contents (a list of classes)")
        self.label_map = label_map = LabelMap.from_config(data.classes, data.ignore_index)  # type: ignore[arg-type]
        learnt, held_out = inspect_files(data, label_map)
        with explained(learnt.infos[0].notes):
            network = known(
                build_network(config.model, learnt.infos[0].bands, label_map.count), config.model.freeze_norm
            )
        _check_best(train.best, label_map, held_out is not None)
        weights = given_weights(train.class_weights, label_map)
        # Weights that are counted later are 1, so that faults show before the count.
        counts_classes = train.class_weights == MEDIAN_FREQUENCY
        ones = (1.0,) * label_map.count if counts_classes else weights
        objective = choose_objective(network, train.loss, label_map.ignore_index, ones)
        store = _store(config, on_cpu)
        question = _question(config, network, learnt, held_out, memory_bytes, ranks, store)
        question = replace(question, loss=loss_bytes_of(config, network, label_map, objective))
        parallel = config.parallel
        open_keys = train.tiles_per_step == AUTO and config.tiling.grid == AUTO and train.images_per_step == 1
        alone = not (parallel.shares_images or parallel.stages > 1 or config.memory.in_blocks)
        usual = _usual_tiles(question) if open_keys and alone and train.windows is None else None
        chosen, question = usual is not None, usual or question
        plan = plan_run(question)
        compiles = train.compiles() == "on"  # auto does not compile: it takes half a minute a shape
        if compiles:
            _check_compiles(question, plan)
        tilings = () if question.windows else plan.tilings[: len(learnt.infos)]
        halo = max(plan.footprint.before, plan.footprint.after)
        trained, validated, split_notes = split_of(config, question.graph, halo, learnt.infos)
        rasters = learnt.cut(tilings, data.area, trained)
        kept = rasters.kept(tilings) if tilings else None
        if plan.spread.shares_images or augmentation(train.augment).moves:
            kept = None  # ranks share each image, or augmentation moves tiles
        if kept is not None and chosen and question.tiles_per_step:
            question = replace(question, tiles_per_step=_tiles_of_step(sum(map(len, kept))))
        if not question.windows:
            train = replace(train, tiles_per_step=question.tiles_per_step)
        self.sampler = sampler = _steps(train, plan, question.windows, learnt, kept)
        if isinstance(train.epochs, str):
            train = replace(train, epochs=-(-USUAL_STEPS // sampler.steps_per_epoch) if chosen else 1)
            train.check_best()
        infos = [info for part in (learnt, held_out) if part for info in (*part.infos, *part.label_infos)]
        files = tuple(file for info in infos for file in info.files)
        if data.area:
            from tiledseg.raster.labels.polygons import vector_files  # here: few runs read polygons

            files += tuple(vector_files(data.area))
        notes = [*split_notes, *layout_notes(learnt.infos, tilings)]
        if config.model.freeze_norm and not (config.model.pretrained or config.model.build):
            notes.append(
                "model.freeze_norm is true, so batch norms keep the mean 0 and the variance 1 that they begin with; "
                "weights that were trained bring statistics (model.pretrained)"
            )
        items = question.windows.per_step if question.windows else train.given_tiles or train.images_per_step
        content = ByContent(train.skip_empty, train.balance_classes)
        assert isinstance(train.epochs, int), "auto is settled"
        self.epochs, self.compiles, self.counts_classes = train.epochs, compiles, counts_classes
        self.by_content = content if content.skip_empty or content.balance else None
        self.user_config = config
        self.config = replace(config, train=train, optimizer=scaled(config.optimizer, items))
        self.question, self.plan, self.objective = question, plan, objective
        self.class_weights, self.files, self.chosen = weights, files, chosen
        self.first_weights: Mapping[str, torch.Tensor] = {}
        self.training = rasters
        self.validation = held_out.cut(plan.held_out, data.area, validated) if held_out else None
        self.warnings = [*reference_notes(infos), *notes, *plan.warnings]


def _question(
    config: Config,
    network: Network,
    learnt: RasterSet,
    held_out: RasterSet | None,
    memory_bytes: int,
    ranks: int,
    store: Store | None,
) -> RunQuestion:
    """Return the planner's question for this run, with the bytes of the usual loss."""
    train, memory, budget = config.train, config.memory, config.memory.bytes()
    drawn = train.drawn()
    windows = None if drawn is None else WindowSteps(drawn.size, drawn.per_step, drawn.halo == "exact")
    whole_images = windows is not None and not windows.exact
    frozen: frozenset[str] = frozenset()
    if config.optimizer.lr_factors:
        modules = freeze(network_modules(network, still=config.model.freeze_norm), config.optimizer.lr_factors)
        parameter_groups(modules.parameters_by_node(), config.optimizer)
        frozen = frozen_nodes(modules)
    average = count_parameters(network.graph(), network.bands) * wide_bytes(ACTIVATION_BYTES[train.precision])
    if config.model.freeze_norm and not any(layer.tracks for layer in network.graph().layers):
        raise ConfigError(
            f"model.freeze_norm is true, but {network.in_words.splitlines()[0]} has no batch norm with running "
            "statistics; leave the key out"
        )
    return RunQuestion(
        network,
        learnt.extents,
        ranks,
        (memory_bytes if budget is None else budget) - (average if train.ema else 0),
        parallelism(config.parallel),
        train.precision,
        held_out=held_out.extents if held_out else (),
        grid=config.tiling.grid_shape(),
        halo=config.tiling.halo_width(),
        tiles_per_step=windows.per_step if windows and windows.exact else train.given_tiles,
        images_per_step=windows.per_step if windows and whole_images else train.images_per_step,
        windows=windows,
        turned=() if windows else _turned(augmentation(train.augment), learnt.infos),
        frozen=frozen,
        still_norms=config.model.freeze_norm,
        recompute=memory.recompute,
        tiles_per_batch=train.tiles_per_batch if isinstance(train.tiles_per_batch, int) else None,
        blocks=_blocks(config, store),
        offload=memory.offload == ALL,
        store=store if memory.offload == AUTO else None,
        budgeted=budget is not None,
        machine=machine_of(config.parallel.machine),
    )


def scaled(optimizer: OptimizerConfig, items: int) -> OptimizerConfig:
    """Return the optimizer with its rate scaled by the items (tiles, windows, images) of a step of all ranks."""
    return replace(optimizer, lr=optimizer.lr * items) if optimizer.scale_lr == "linear" else optimizer


def _usual_tiles(question: RunQuestion) -> RunQuestion | None:
    """Choose default grids and tiles of a step, independent of ranks and memory. Return None if tiles are not exact for
    this network; the question unchanged if a step is one whole image anyway."""
    if measuring(question.graph):
        return None
    footprint = network_footprint(question.graph, question.halo, question.parallel.exact)
    grids = usual_grids([extent.shape for extent in question.rasters], footprint)
    rasters = tuple(
        extent if extent.grid else extent._replace(grid=grid)
        for extent, grid in zip(question.rasters, grids, strict=True)
    )
    tiles = sum(rows * cols for rows, cols in (extent.grid or (1, 1) for extent in rasters))
    per_step = _tiles_of_step(tiles)
    if per_step == 1 and tiles == len(rasters):
        return question
    return replace(question, rasters=rasters, tiles_per_step=per_step)


def _tiles_of_step(tiles: int) -> int:
    """Return the default tiles of a step: four, or fewer if an epoch would have fewer than four steps."""
    return max(1, min(USUAL_BATCH, tiles // USUAL_BATCH))


def _steps(
    train: TrainConfig, plan: RunPlan, windows: WindowSteps | None, learnt: RasterSet, kept: Kept | None
) -> Steps:
    """Return the steps of a run, with the augmentation draw of each tile."""
    changes = augmentation(train.augment)
    drawer = Drawer(changes, tuple(info.shape for info in learnt.infos), learnt.infos[0].bands)
    if windows is not None:
        footprint = plan.footprint if windows.exact else None
        return DrawnWindows(drawer, windows.side, windows.per_step, train.seed, footprint)
    tiles = kept or tuple(range(len(tiling)) for tiling in plan.tilings[: len(learnt.infos)])
    by = train.given_tiles, train.images_per_step
    turned = _turned(changes, learnt.infos)
    return Sampler(tiles, train.seed, *by, drawer, train.augment_each, turned, plan.tilings)


def _turned(changes: Augmentation, images: Sequence[RasterInfo]) -> tuple[int, ...]:
    """Return the numbers of the images whose shape a quarter turn of the augmentation changes."""
    return tuple(k for k, info in enumerate(images) if changes.turn == 90 and info.height != info.width)


def _blocks(config: Config, store: Store | None) -> BlockSettings | None:
    """Return the planner's question about blocks; None if tiles are computed whole. `store`: rates of the file."""
    memory, in_file = config.memory, config.memory.in_file
    if memory.in_blocks:
        return BlockSettings(memory.blocks_shape(), in_file, store=store)
    compiles = config.train.compiles() == "on"  # a compiled network takes tiles whole
    return BlockSettings(None, in_file, True, store) if memory.may_block and not compiles else None


def _store(config: Config, on_cpu: bool) -> Store | None:
    """Return the rates of `memory.store`, from the machine's profile or assumed; None if the plan needs none. Raises
    ConfigError if the store is not a folder."""
    memory = config.memory
    memory.check_folder()
    if memory.offload != AUTO and not (memory.in_file and (memory.may_block or memory.in_blocks)):
        return None
    machine = machine_of(config.parallel.machine) or (find_machine(SOME_CPU) if on_cpu else ASSUMED)
    machine = machine.computing(config.train.precision)
    return (disk_of if memory.in_file else store_of)(machine) or replace(ASSUMED_STORE, machine=machine)


def _check_best(score: str, label_map: LabelMap, validates: bool) -> None:
    """Raise ConfigError for a score of `train.best` without validation data, or of an unknown class."""
    if score != "none" and not validates:
        raise ConfigError(
            f"train.best is {score}, but nothing is validated on; give data.val_images, data.split, or a manifest with "
            "a column split"
        )
    name = class_of(score)
    if name is not None and name not in label_map.numbers:
        names = ", ".join(record.name for record in label_map.classes)
        raise ConfigError(f"train.best is {score}, but no class is '{name}'; give one of {names}, or its number")


def _check_compiles(question: RunQuestion, plan: RunPlan) -> None:
    """Raise ConfigError if the steps of this plan cannot be compiled."""
    placed = [node.name for node in question.graph.nodes if node.layer.asks_place]
    keeps_all = named_policy(question.graph, question.recompute).keeps_all
    reasons = {
        "parallel.halo is layer; give read or exchange": plan.spread.shares_layers,
        "parallel.stages cut it; give 1": plan.pipeline is not None,
        "memory.blocks cuts tiles; leave it out": plan.blocks is not None,
        "memory.budget recomputes parts of it; give a larger one, or compile off": plan.rebuilt is not None,
        "memory.recompute recomputes parts of it; give auto": not keeps_all,
        "memory.offload moves its activations; leave it out": plan.offloaded is not None,
        f"{next(iter(placed), '')} depends on its place in the image; give compile off": len(placed) > 0,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(f"train.compile is on, which needs the whole network, but {reason}")
