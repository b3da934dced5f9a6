"""Everything that can be known, and refused, before a run starts: files, network, and its plan.

One rank looks at the files and tells the others; nothing is written and no pixel is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import build_network
from tiledseg.checkpoint.saved_state import FoundSettings, SavedState
from tiledseg.config.augmentation import Augmentation, augmentation
from tiledseg.config.data import IMAGENET, DataConfig
from tiledseg.config.memory import ALL, recompute_of
from tiledseg.config.run import Config, ModelConfig, OptimizerConfig
from tiledseg.config.train import TrainConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.shapes import count_parameters
from tiledseg.geometry.tiling import Tiling
from tiledseg.models.frozen import freeze, frozen_nodes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.grid import usual_grids
from tiledseg.planning.run.norms import exact_modes
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion, Windows
from tiledseg.raster.finding.sources import (
    HELD_OUT,
    HELD_OUT_ALONE,
    LEARNT,
    Parts,
    as_list,
    has_validation,
    pair_sources,
)
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.labels.class_counts import median_frequency_weights
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import PairReading, check_used
from tiledseg.raster.samples.drawn_steps import DrawnTiles, DrawnWindows
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.layout import layout_warning
from tiledseg.raster.samples.sampling import Sampler, Steps
from tiledseg.raster.samples.spatial_split import SpatialSplit
from tiledseg.raster.statistics import check_alike
from tiledseg.tracing.build import known, network_modules
from tiledseg.training.best import judge_of
from tiledseg.training.losses.choose_objective import given_weights, weighted
from tiledseg.training.losses.objective import Objective
from tiledseg.training.preparing.auto import find_settings, with_settings
from tiledseg.training.preparing.first_weights import check_imagenet
from tiledseg.training.preparing.from_config import (
    blocks_asked,
    label_map_of,
    loss_bytes_of,
    objective_of,
    reading_of,
    recipe_of,
    record_of,
    update_of,
    windows_of,
)
from tiledseg.training.preparing.raster_set import PairFiles, RasterSet, SplitAsked, inspect, split_of
from tiledseg.training.recipe import Recipe
from tiledseg.training.steps.optimizer import parameter_groups
from tiledseg.units.widths import ACTIVATION_BYTES, wide_bytes
from tiledseg.user_files.machine import machine_of

USUAL_BATCH, USUAL_STEPS = 4, 500
"""Tiles of a step, and fewest steps of a run, where nobody says others."""

_TRAINING, _VALIDATION = ("images", "labels"), ("val_images", "val_labels")


if TYPE_CHECKING:
    import torch

    from tiledseg.planning.memory.store import Store


@dataclass(frozen=True)
class Preparation:
    """A run that can start: a value that one rank computes and all share."""

    recipe: Recipe
    question: RunQuestion
    plan: RunPlan
    label_map: LabelMap
    objective: Objective
    class_weights: tuple[float, ...]  # of the loss; none where all are 1, or as long as they are not counted
    sampler: Steps
    training: RasterSet
    validation: RasterSet | None
    warnings: tuple[str, ...]
    files: tuple[str, ...]  # all that the rasters are read from
    found: FoundSettings | None = None  # what `parallel.auto` leaves to the program
    chosen: bool = False  # grid and steps, since nobody says them


def prepare(
    config: Config,
    memory_bytes: int,
    ranks: int,
    machine: Machine | None = None,
    before: SavedState | None = None,
    ranks_a_store: int = 1,
    device: torch.device | None = None,
) -> Preparation:
    """Check a configuration against the files that it names, and plan the run on them.

    `memory_bytes` is what one rank may use, `ranks` how many there are, `ranks_a_store` how many share the way to
    `memory.store`, `device` that of this one (None: a CPU): all change speed and memory only. Where `parallel.auto`
    leaves settings to the program, so do the `machine` that the ranks run on, and what the run had `before`. Raises
    InputError of some kind for the first thing that cannot be.
    """
    config.check()
    label_map = label_map_of(config.data)
    reading = reading_of(config.data, label_map)
    found = inspect(*_paths(config.data, _TRAINING, LEARNT), reading)
    check_used(reading.labels, found.label_paths)
    if config.data.normalize == IMAGENET:
        check_imagenet(found.images[0])
    held_out = found if config.data.split else _held_out(config.data, reading)
    if held_out:
        check_alike([found.images[0], *held_out.images])
    network = known(build_network(config.model, found.images[0].bands, label_map.count), config.model.freeze_norm)
    train, budget = config.train, config.memory.bytes()
    recompute = recompute_of(config.memory, config.parallel)
    memory_bytes = memory_bytes if budget is None else budget
    weights = given_weights(train.class_weights, label_map)
    objective = objective_of(config, network, label_map, weights)
    windows, profiled = windows_of(train), machine_of(config.parallel.machine)
    store = _store(config, profiled, ranks_a_store, device)
    question = RunQuestion(
        network,
        found.extents,
        ranks,
        memory_bytes - (_average_bytes(network, train.precision) if train.ema else 0),
        parallelism(config.parallel, recompute.stages),
        train.precision,
        held_out=held_out.extents if held_out else (),
        grid=config.tiling.grid_shape(),
        halo=config.tiling.halo_width(),
        tiles_per_step=windows.per_step if windows and windows.exact else train.given_tiles,
        images_per_step=windows.per_step if windows and not windows.exact else train.images_per_step,
        windows=windows,
        turned=() if windows else _turned(augmentation(train.augment), found.images),
        frozen=_frozen(network, config.optimizer, config.model.freeze_norm),
        still_norms=config.model.freeze_norm,
        recompute=recompute.nodes,
        tiles_per_batch=train.batch(),
        blocks=blocks_asked(config, store),
        offload=config.memory.offload == ALL,
        store=store if config.memory.chooses_offload else None,
        budgeted=budget is not None,
        loss=loss_bytes_of(config, network, label_map, objective),
        machine=profiled,
    )
    _check_norms(config.model, network)
    usual = _usual_tiles(question) if config.chooses_tiles else question
    chosen, question = usual is not question, usual
    settings = find_settings(question, config, machine, before) if config.parallel.auto else None
    question = with_settings(question, config, settings) if settings else question
    plan = plan_run(question)
    tilings = () if windows else plan.tilings[: len(found.images)]
    split, split_notes = _split(config, plan, question.graph, found.images)
    trained, validated = split.parts() if split else ((), ())
    rasters = found.cut(tilings, config.data.area, trained)
    kept = _kept(train, plan, rasters)
    if chosen and kept is not None:
        question = replace(question, tiles_per_step=_tiles_of_step(sum(map(len, kept))))
    train = replace(train, tiles_per_step=question.tiles_per_step) if not windows else train
    sampler = steps_of(train, plan, windows, found, kept)
    if isinstance(train.epochs, str):
        train = replace(train, epochs=-(-USUAL_STEPS // sampler.steps_per_epoch) if chosen else 1)
        train.check_best()
    every = [part for part in (found, held_out) if part]
    notes = reference_notes([info for part in every for info in (*part.images, *part.labels)])
    recipe = recipe_of(replace(config, train=train), judge_of(train.best, train.early_stop, label_map, bool(held_out)))
    return Preparation(
        replace(recipe, record=record_of(config)),
        question,
        plan,
        label_map,
        objective,
        weights,
        sampler,
        rasters,
        held_out.cut(plan.held_out, config.data.area, validated) if held_out else None,
        (*notes, *split_notes, *_notes(found.images, tilings), *plan.warnings),
        (*(file for part in every for file in part.files), *_area_files(config.data)),
        settings,
        chosen,
    )


def _usual_tiles(question: RunQuestion) -> RunQuestion:
    """The question with tiles and steps that a network learns from, whatever the ranks and their memory, where a tile
    gives what the whole image gives. As it is where a step would be a whole image all the same."""
    if "read" not in exact_modes(question.graph, tiles=2, trains=True):
        return question
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
    """Four, or fewer where an epoch would have fewer than four steps."""
    return max(1, min(USUAL_BATCH, tiles // USUAL_BATCH))


def _split(
    config: Config, plan: RunPlan, graph: Graph, infos: Sequence[RasterInfo]
) -> tuple[SpatialSplit | None, tuple[str, ...]]:
    data, halo = config.data, max(plan.footprint.before, plan.footprint.after)
    if data.split is None:
        return None, ()
    asked = SplitAsked(data.split, data.split_share, data.split_gap, data.split_seed)
    reach, keyed = augmentation(config.train.augment).reach, config.model.build is None
    return split_of(asked, graph, halo, reach, config.parallel.exact, infos, keyed)


def _kept(train: TrainConfig, plan: RunPlan, rasters: RasterSet) -> tuple[tuple[int, ...], ...] | None:
    """The tiles that hold pixels that count, where tiles stay in their places and are computed one by one."""
    found = rasters.kept(rasters.tilings) if rasters.tilings else None
    return None if plan.spread.shares_images or augmentation(train.augment).moves else found


def _area_files(data: DataConfig) -> tuple[str, ...]:
    if not data.area:
        return ()
    from tiledseg.raster.labels.polygons import vector_files

    return vector_files(data.area)


def _held_out(data: DataConfig, reading: PairReading) -> PairFiles | None:
    """The rasters to validate on: named by keys of their own, or of a split in the list of images."""
    if data.val_images:
        return inspect(*_paths(data, _VALIDATION, HELD_OUT_ALONE), reading)
    if has_validation(as_list(data.images)):
        return inspect(*_paths(data, _TRAINING, HELD_OUT), reading)
    return None


def _paths(data: DataConfig, keys: tuple[str, str], parts: Parts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    images, labels = (as_list(getattr(data, key)) for key in keys)
    return pair_sources(images, labels, (f"data.{keys[0]}", f"data.{keys[1]}"), parts, data.references)


def steps_of(
    train: TrainConfig,
    plan: RunPlan,
    windows: Windows | None,
    found: PairFiles,
    kept: tuple[tuple[int, ...], ...] | None = None,
) -> Steps:
    """All steps of a run, with what each tile draws."""
    drawer = Drawer(augmentation(train.augment), tuple(info.shape for info in found.images), found.images[0].bands)
    if windows is None:
        counts = tuple(map(len, plan.tilings[: len(found.images)] if kept is None else kept))
        sampler = Sampler(counts, train.seed, train.given_tiles, train.images_per_step, kept)
        turned = _turned(augmentation(train.augment), found.images)
        return DrawnTiles(sampler, drawer, train.augment_each, turned=turned)
    return DrawnWindows(drawer, windows.side, windows.per_step, train.seed, plan.footprint if windows.exact else None)


def _turned(asked: Augmentation, images: Sequence[RasterInfo]) -> tuple[int, ...]:
    """The images that a quarter turn gives another shape."""
    return tuple(k for k, info in enumerate(images) if asked.turn == 90 and info.height != info.width)


def _store(config: Config, machine: Machine | None, ranks: int, device: torch.device | None) -> Store | None:
    """The rates of the store where the plan chooses what lies there, or says what blocks there cost. Raises ConfigError
    where it is no folder."""
    memory = config.memory
    memory.check_folder()
    if not memory.chooses_offload and not (memory.in_file and (memory.may_block or memory.in_blocks)):
        return None

    from tiledseg.training.preparing.measured_store import measured_store

    return measured_store(config.memory.store, ranks, machine, config.train.precision, device)


def with_class_weights(preparation: Preparation, weights: tuple[float, ...]) -> Preparation:
    """With the weights of classes in its loss."""
    return replace(preparation, class_weights=weights, objective=weighted(preparation.objective, weights))


def with_counts(preparation: Preparation, counts: NDArray[np.int64]) -> Preparation:
    """With the weights of classes by how often each is in the training images; a warning for one that none has."""
    absent = [str(k) for k, count in enumerate(counts.sum(axis=0).tolist()) if not count]
    note = f"no training pixel is of class {', '.join(absent)}: its weight in the loss is 1"
    preparation = replace(preparation, warnings=(*preparation.warnings, *([note] if absent else [])))
    return with_class_weights(preparation, median_frequency_weights(counts))


def _average_bytes(network: Network, precision: str) -> int:
    """What an average of the weights takes of a rank's memory, beside its steps."""
    return count_parameters(network.graph(), network.bands) * wide_bytes(ACTIVATION_BYTES[precision])


def _frozen(network: Network, optimizer: OptimizerConfig, still: bool) -> frozenset[str]:
    """The nodes that `optimizer.lr_factors` freezes. Raises ConfigError where its patterns do not fit the network."""
    if not optimizer.lr_factors:
        return frozenset()
    modules = freeze(network_modules(network, still=still), optimizer.lr_factors)
    parameter_groups(modules.parameters_by_node(), update_of(optimizer))
    return frozen_nodes(modules)


def _check_norms(model: ModelConfig, network: Network) -> None:
    """Nothing is accepted and ignored."""
    if model.freeze_norm and not any(layer.tracks for layer in network.graph().layers):
        raise ConfigError(
            f"model.freeze_norm is true, but {network.in_words.splitlines()[0]} has no batch norm with running "
            "statistics; leave it out"
        )


def _notes(infos: Sequence[RasterInfo], tilings: Sequence[Tiling]) -> list[str]:
    notes = [note for info in infos for note in info.notes]
    slow = [w for info, tiling in zip(infos, tilings, strict=bool(tilings)) if (w := layout_warning(info, tiling))]
    if len(slow) > 1:
        slow = [f"{slow[0]} (and {len(slow) - 1} more files)"]
    return notes + slow


def check_compiling(preparation: Preparation, device: torch.device) -> None:
    """Raise ConfigError where a run that is to be compiled cannot be."""
    found = why_uncompiled(preparation)
    if found is not None:
        raise ConfigError(found)
    if preparation.recipe.compiles:
        from tiledseg.models.compiled import check_compiler

        check_compiler(device)


def why_uncompiled(preparation: Preparation) -> str | None:
    """Return the reason against compiling a run on any device."""
    found = _obstacle(preparation.plan, preparation.recipe.recompute) if preparation.recipe.compiles else None
    return None if found is None else f"train.compile is on, which takes a network whole, but {found}"


def _obstacle(plan: RunPlan, recompute: str) -> str | None:
    """Why the network does not go through its tiles whole, and what to do."""
    graph, bands = plan.network.graph(), plan.network.bands
    asking = [node.name for node in graph.nodes if node.layer.asks_place]
    reasons = {
        "parallel.halo is layer; give read or exchange": plan.spread.shares_layers,
        "parallel.stages cut it; give 1": plan.pipeline is not None or plan.spread.mesh.stages > 1,
        "memory.blocks cuts tiles; leave it out": plan.blocks is not None,
        "memory.budget has it computed once more; give a larger one, or compile off": plan.rebuilt is not None,
        "memory.recompute has it computed once more; give auto": not named_policy(graph, bands, recompute).keeps_all,
        "memory.offload moves what it keeps; leave it out": plan.offloaded is not None,
        f"{next(iter(asking), '')} depends on its place in the image; give compile off": len(asking) > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
