"""The start of a run: preparation, search for its checkpoint, survey of the data, claim of the output folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.network import Network, Pretrainable
from tiledseg.checkpoint.folder import (
    Checkpoint,
    clean_leftovers,
    drop_later,
    find_checkpoint,
    newest_checkpoint,
    newest_step,
    point_best,
)
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.data import IMAGENET
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError, ConfigError, LabelError, OutputError
from tiledseg.execution.carrying import make_deterministic, naming_disorder
from tiledseg.execution.memory import check_weights, memory_per_rank
from tiledseg.execution.progress import Shown, StepProgress, unseen
from tiledseg.execution.survey import survey, survey_content
from tiledseg.memory.device import is_gpu
from tiledseg.planning.run.question import RunQuestion
from tiledseg.raster.labels.label_map import median_frequency_weights
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.content import Content, square_units, tile_units
from tiledseg.raster.samples.sampling import DrawnTiles, DrawnWindows, Position
from tiledseg.raster.statistics import Normalization
from tiledseg.system.console import counted
from tiledseg.system.files import write_whole, writing
from tiledseg.system.freed_memory import keep_no_more
from tiledseg.system.outputs import CHECKPOINTS, CONFIG, METRICS, VALIDATION
from tiledseg.system.run_lock import hold
from tiledseg.training.choose_objective import weighted
from tiledseg.training.offloading import check_store, store_in_words, suggesting_settings
from tiledseg.training.optimizer import Course
from tiledseg.training.preparation import Preparation, prepare, why_uncompiled
from tiledseg.training.resuming import Beginning, begin
from tiledseg.training.run_files import check_lines, check_none_lost, check_run_folder, own_files, read_metrics
from tiledseg.training.run_journal import facts_of
from tiledseg.training.saving import end_of_job
from tiledseg.training.trainer import Trainer

if TYPE_CHECKING:
    from tiledseg.checkpoint.loading import FirstWeights

FEWEST_STEPS = 100
"""Steps of a run below which there is a warning."""


@naming_disorder()
def start(config: Config, text: str, mesh: Mesh, files: Sequence[str] = (), command: str = "") -> int:
    """Run a configuration on a mesh and return the exit code. Collective. `text`: the configuration as YAML; `files`:
    those that it was read from; `command`: as typed.

    Every check comes before the first write, so a failed check leaves no files.
    """
    end = end_of_job(os.environ)
    make_deterministic(config.train.deterministic)  # before the first kernel runs
    mesh.on_root(lambda: check_store(config.memory.offload, config.memory.store, mesh.device))
    mesh.on_all(config.memory.check_folder)  # each host has its own
    preparation = _prepared(config, mesh)
    folder, pretrained = Path(config.run.output), config.model.pretrained
    weights_file = [pretrained] if pretrained and Path(pretrained).exists() else []  # a resumed run needs it no more
    mesh.on_root(lambda: check_run_folder(folder, [*preparation.files, *files, *weights_file]))
    lines: list[dict[str, Any]] = []  # of metrics, on the root alone

    def find_beginning() -> tuple[int | None, Beginning, str | None]:
        newest, beginning = newest_step(folder / CHECKPOINTS), begin(_checkpoint_of(config), preparation)
        if over := _own_end(beginning, preparation):  # changed values affect no step
            beginning = replace(beginning, resumed=over.saved.resumed)
        checkpoint = beginning.checkpoint
        if checkpoint is None:
            return newest, beginning, check_none_lost(folder, config.train.checkpoint_every)
        lines.extend(read_metrics(folder / METRICS))
        own = checkpoint.path.parent.resolve() == (folder / CHECKPOINTS).resolve()
        return newest, beginning, check_lines(folder / METRICS, checkpoint.saved.step, lines) if own else None

    newest, beginning, lost = mesh.on_root(find_beginning)
    first = first_weights(pretrained if beginning.checkpoint is None else None, preparation.plan.network, mesh)
    if first is not None:
        beginning = replace(beginning, pretrained=first.origin, warnings=(*beginning.warnings, first.note))
    normalization, preparation = survey_data(preparation, beginning, mesh)
    preparation = count_by_place(preparation, mesh)
    with ExitStack() as stack:  # the root holds the lock of the folder
        unlocked = mesh.on_root(lambda: stack.enter_context(hold(folder)))
        over = _own_end(beginning, preparation) is not None
        mesh.on_root(lambda: _claim(folder, text, beginning, newest, over))
        hosts = mesh.communicator.gather_objects(mesh.host)
        notes = [warning for warning in (lost, idle_ranks(preparation, mesh.size), unlocked) if warning]
        warnings = (*preparation.warnings, *beginning.warnings, *normalization.warnings(), *notes)
        freed = ""
        plan, on_cpu = preparation.plan, mesh.device.type == "cpu"
        if preparation.question.budgeted and on_cpu and (plan.rebuilt is not None or plan.blocks is not None):
            keep_no_more(os.environ)
            freed = "freed memory goes back to the system"
        started: dict[str, Any] = {}
        if mesh.is_root:
            started = facts_of(preparation, mesh, command, warnings, hosts)
            progress = StepProgress(0, 0, 2 if config.run.verbosity else 0)
            quicker = ""
            if is_gpu(mesh.device) and config.train.precision == "fp32":
                quicker = "train.precision bf16 is many times as fast on a GPU (docs/how-to/gpu.md)"
            short = "" if over else few_steps(preparation)
            opening = _opening_lines(preparation, beginning, (*warnings, short))
            for line in filter(None, [*opening, freed, quicker]):
                progress.say(line)
        weights = first.tensors if first else {}
        trainer = Trainer(mesh, preparation, normalization, beginning, weights, lines, started)
        with suggesting_settings(preparation.question, preparation.plan):
            return trainer.run(end)


def _prepared(config: Config, mesh: Mesh) -> Preparation:
    """Prepare the run on the root, for its ranks' devices and memory. Collective."""
    memory = memory_per_rank(mesh)

    def on_root() -> Preparation:
        preparation = prepare(config, memory, mesh.size, mesh.device.type == "cpu")
        if refusal := why_uncompiled(preparation):
            raise ConfigError(refusal)
        if preparation.compiles:
            from tiledseg.models.compiled import check_compiler

            check_compiler(mesh.device)
        return preparation

    preparation: Preparation = mesh.on_root(on_root)
    # A CPU rank without stages holds weights and gradients; `train.ema` adds a copy.
    whole = preparation.question.parallel.stages == 1 and mesh.device.type == "cpu"
    copies = (2 if whole else 1) + (config.train.ema > 0)
    mesh.on_root(lambda: check_weights(preparation.plan.network, copies, config.train.precision, mesh))
    return preparation


def _checkpoint_of(config: Config) -> Checkpoint | None:
    """Find the checkpoint to resume; None for a new run."""
    folder = Path(config.run.output) / CHECKPOINTS
    if config.train.resume == "never":
        if folder.is_dir() and any(folder.iterdir()):
            raise OutputError(
                f"{folder} holds checkpoints and train.resume is never; give another run.output, or resume auto"
            )
        return None
    if config.train.resume == "auto":
        return newest_checkpoint(folder)
    checkpoint, newest = find_checkpoint(config.train.resume), newest_step(folder)
    if newest is not None and newest > checkpoint.saved.step:  # the next `resume: auto` would take the newer one
        raise OutputError(
            f"train.resume is {checkpoint.path}, but {folder} holds the newer step-{newest:06d}; give another "
            "run.output, or resume auto"
        )
    return checkpoint


def _own_end(beginning: Beginning, preparation: Preparation) -> Checkpoint | None:
    """Return the resumed checkpoint if it lies in this run's folder and no step is left, else None."""
    course, checkpoint = Course(preparation.epochs, preparation.sampler.steps_per_epoch), beginning.checkpoint
    if checkpoint is None or course.left(checkpoint.saved.position):
        return None
    own = Path(preparation.config.run.output) / CHECKPOINTS
    return checkpoint if checkpoint.path.parent.resolve() == own.resolve() else None


def _claim(folder: Path, text: str, beginning: Beginning, newest: int | None, over: bool) -> None:
    """Clean the locked folder after a crash, and write the configuration, unless the run is `over`."""
    checkpoint = beginning.checkpoint
    now = newest_step(folder / CHECKPOINTS)
    if now != newest:  # another run wrote between the first look and the lock
        raise OutputError(
            f"{folder} has been written by another run: its newest checkpoint was of step {newest} and is of step "
            f"{now}; run the command again"
        )
    clean_leftovers(folder / CHECKPOINTS)
    if not (over and (folder / CONFIG).exists()):
        write_whole(folder / CONFIG, text)
    with writing(folder / VALIDATION):
        for step, path in own_files(folder):
            if step > (checkpoint.saved.step if checkpoint is not None else 0):
                path.unlink()
    with writing(folder):
        if checkpoint is None:
            (folder / METRICS).unlink(missing_ok=True)
        else:
            drop_later(folder / CHECKPOINTS, checkpoint.saved.step)
        point_best(folder / CHECKPOINTS, beginning.best.step if beginning.best else None)


def few_steps(preparation: Preparation) -> str:
    """Return a warning if the run has fewer than `FEWEST_STEPS` steps, else an empty string."""
    an_epoch, epochs = preparation.sampler.steps_per_epoch, preparation.epochs
    if an_epoch * epochs >= FEWEST_STEPS:
        return ""
    return (
        f"the run has {counted(an_epoch * epochs, 'step')} in all ({an_epoch} an epoch), which teach a network little; "
        f"give train.epochs {-(-FEWEST_STEPS // an_epoch)} or more, or smaller steps (tiling.grid, "
        "train.tiles_per_step)"
    )


def idle_ranks(preparation: Preparation, ranks: int) -> str:
    """Return a warning if a step has fewer tiles than ranks, else an empty string."""
    spread, train = preparation.plan.spread, preparation.config.train
    stages = spread.mesh.stages
    workers = ranks // stages
    tiles = len(next(iter(preparation.sampler.steps_from(Position(0, 0), 1)))[1])
    if spread.shares_images or tiles >= workers:
        return ""
    windows = preparation.question.windows
    key = f"train.windows: per_step {workers}" if windows else f"train.tiles_per_step {workers}"
    if not windows and train.given_tiles is None:
        key = "a finer tiling.grid"
    return (
        f"{(workers - tiles) * stages} of {ranks} ranks are idle: a step has {counted(tiles, 'tile')}; give {key}, or "
        f"start {counted(tiles * stages, 'rank')}"
    )


def _opening_lines(preparation: Preparation, beginning: Beginning, warnings: Sequence[str]) -> list[str]:
    """Return the lines printed before the first step: warnings, and how the run is cut, spread and kept in memory."""
    plan, question = preparation.plan, preparation.question
    lines = [f"warning: {warning}" for warning in warnings if warning]
    windows, (rows, cols) = question.windows, plan.tilings[0].grid
    cut = windows.in_words if windows else f"grid {rows} x {cols}"
    halo = "" if windows and not windows.exact else f", halo {plan.footprint.before} px"
    lines.append(f"{counted(len(preparation.training.images), 'image')}, {cut}{halo}")
    if preparation.chosen:
        tiles = counted(sum(map(len, preparation.training.tilings)), "tile")
        each = f"{question.tiles_per_step} of {tiles}" if question.tiles_per_step else "a whole image"
        lines.append(
            f"default steps: {each} each, {preparation.sampler.steps_per_epoch} an epoch, "
            f"{counted(preparation.epochs, 'epoch')} (docs/reference/training.md)"
        )
    if plan.spread.shares_images:
        lines.append(f"halo mode {plan.spread.in_words}")
    if question.recomputes:
        lines.append(f"memory.recompute {question.recompute}: a step needs about {plan.memory / 2**20:.1f} MiB")
    if plan.offloaded is not None:
        lines.append(f"offload: {plan.offloaded.in_words(store_in_words(preparation.config.memory.store))}")
    if plan.blocks is not None:
        lines.append(f"blocks: {plan.blocks.in_words}, {_basis(question)}")
    if plan.pipeline is not None:
        lines.append(f"pipeline of {plan.pipeline.in_words}, mesh {plan.spread.mesh}")
    if plan.rebuilt is not None:
        lines.append(f"{plan.rebuilt.in_words}, {_basis(question)}")
    if preparation.class_weights:
        lines.append(f"weights of the classes: {', '.join(f'{weight:.4g}' for weight in preparation.class_weights)}")
    if beginning.checkpoint is not None:
        lines.append(f"resuming from {beginning.checkpoint.path}")
    return lines


def _basis(question: RunQuestion) -> str:
    """Return the basis of a predicted time: measured or assumed speed."""
    measured = question.store or (question.blocks and question.blocks.store)
    return f"by the {'measured' if measured else 'assumed'} speed of a rank"


# Red, green and blue of ImageNet, scaled to 0..1, from torchvision's documentation of its weights.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEAST_SQUARE = 16  # least side in pixels of a region of labels, where windows are drawn by their labels


def first_weights(path: str | None, network: Network, mesh: Mesh) -> FirstWeights | None:
    """Read the file of `model.pretrained` on every rank; None if there is none. Collective.

    A fault on one rank is raised on all. Raises CheckpointError if ranks read different files.
    """
    if path is None:
        return None
    from tiledseg.checkpoint.loading import load_pretrained

    assert isinstance(network, Pretrainable), "presets refuse the key elsewhere"
    found = mesh.on_all(lambda: load_pretrained(path, network))
    if len(set(mesh.communicator.gather_objects(found.origin))) > 1:
        raise CheckpointError(f"{path} is not the same file on all ranks; give one that all of them share")
    return found


def survey_data(preparation: Preparation, beginning: Beginning, mesh: Mesh) -> tuple[Normalization, Preparation]:
    """Return the normalisation, and the preparation with class weights: the checkpoint's, or measured for a new run.
    The labels of all new images are checked. Collective."""
    checkpoint, normalize = beginning.checkpoint, preparation.config.data.normalize
    # The checkpoint's class weights hold unless `train.class_weights` has changed since.
    weighs = checkpoint is not None and bool(checkpoint.saved.class_weights)
    later = [r for r in beginning.resumed if checkpoint and r.step == checkpoint.saved.step]
    count = preparation.counts_classes and not (weighs and not any("train.class_weights" in r.changed for r in later))
    numbers = range(len(preparation.training.images)) if checkpoint is None or count else beginning.added
    if numbers:
        with ExitStack() as stack:
            images, labels = _opened(preparation, numbers, stack)
            shown: Shown = unseen
            if mesh.is_root:
                shown = stack.enter_context(closing(StepProgress(0, 0, preparation.config.run.verbosity))).part
            measures = normalize is not False and checkpoint is None
            found = survey(mesh, images, labels, preparation.label_map, measures, count, shown)
        if checkpoint is None and not found.labels.any():
            raise mark_agreed(
                LabelError(
                    "no pixel of data.labels is of a class: all are data.ignore_index "
                    f"({preparation.label_map.ignore_index}), without data or outside the training area; check "
                    "data.labels, data.classes and data.area"
                )
            )
        absent = [str(k) for k, pixels in enumerate(found.labels.tolist()) if not pixels]
        if checkpoint is None and absent and found.unlabelled:
            number = preparation.label_map.ignore_index
            note = (
                f"no label has class {', '.join(absent)}, and {found.unlabelled:,} label pixels are not counted: they "
                f"are {number} or without data; if {number} is a class, give it in data.classes by its values "
                "(docs/how-to/own-data.md)"
            )
            preparation = replace(preparation, warnings=(*preparation.warnings, note))
        if found.counts is not None:
            absent = [str(k) for k, pixels in enumerate(found.counts.sum(axis=0).tolist()) if not pixels]
            note = f"no training pixel is of class {', '.join(absent)}: its weight in the loss is 1"
            preparation = replace(preparation, warnings=(*preparation.warnings, *([note] if absent else [])))
            preparation = _with_class_weights(preparation, median_frequency_weights(found.counts))
        if checkpoint is None and normalize == IMAGENET:  # for the first three bands; others as measured
            measured = found.normalization
            mean, deviation = (tuple(255 * value for value in values) for values in (MEAN, DEVIATION))
            constant = tuple(band for band in measured.constant if band >= len(MEAN))
            rest = {"mean": (*mean, *measured.mean[len(mean) :]), "std": (*deviation, *measured.std[len(deviation) :])}
            return replace(measured, constant=constant, **rest), preparation
        if checkpoint is None:
            return found.normalization, preparation
    assert checkpoint is not None, "a new run surveys all its images"
    if preparation.counts_classes and not count:
        preparation = _with_class_weights(preparation, checkpoint.saved.class_weights)
    return checkpoint.saved.normalization, preparation


def count_by_place(preparation: Preparation, mesh: Mesh) -> Preparation:
    """Return the preparation with steps drawn by their labels, which each run and resumed run counts anew.
    Collective. Raises ConfigError if too few tiles or windows are left."""
    steps, rules = preparation.sampler, preparation.by_content
    if rules is None:
        return preparation
    if isinstance(steps, DrawnWindows):
        units = square_units(steps.drawer.shapes, max(LEAST_SQUARE, steps.side // 2))
    else:
        units = tile_units(preparation.training.tilings)
    with ExitStack() as stack:
        images, labels = _opened(preparation, range(len(preparation.training.labels)), stack)
        counts = survey_content(mesh, units, images, labels, preparation.label_map)
    content = Content(tuple(region for unit in units for region in unit), counts, rules)
    if isinstance(steps, DrawnWindows):
        return replace(preparation, sampler=replace(steps, content=content))
    assert isinstance(steps, DrawnTiles), "there are no other steps"
    drawn = replace(steps, sampler=replace(steps.sampler, content=content), tilings=preparation.plan.tilings)
    return replace(preparation, sampler=drawn)


def _opened(
    preparation: Preparation, numbers: Sequence[int], stack: ExitStack
) -> tuple[list[RasterReader], list[RasterReader]]:
    """Open images and labels; the stack closes them."""
    rasters = preparation.training
    images = [stack.enter_context(rasters.open_counted(number)) for number in numbers]
    return images, [stack.enter_context(rasters.open_labels(number)) for number in numbers]


def _with_class_weights(preparation: Preparation, weights: tuple[float, ...]) -> Preparation:
    return replace(preparation, class_weights=weights, objective=weighted(preparation.objective, weights))
