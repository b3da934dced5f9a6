"""From a configuration to a running trainer: prepare, find what to resume, survey the data, claim the output folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, LabelError, OutputError
from tiledseg.execution.memory import check_weights, memory_per_rank, ranks_sharing
from tiledseg.execution.precision import make_deterministic, naming_disorder
from tiledseg.execution.progress import Shown, StepProgress, unseen
from tiledseg.execution.surveys.survey import Survey, survey, survey_content
from tiledseg.execution.times import with_times
from tiledseg.planning.run.pipeline import spread_note
from tiledseg.raster.statistics import Normalization
from tiledseg.system.console import counted
from tiledseg.system.outputs import CHECKPOINTS, CONFIG, METRICS
from tiledseg.system.run_lock import hold
from tiledseg.system.writing import writing
from tiledseg.training.offloading import Freed, check_store, store_in_words, told_what_fits
from tiledseg.training.preparing.auto import in_words
from tiledseg.training.preparing.by_content import content_units, with_content
from tiledseg.training.preparing.first_weights import first_weights, imagenet
from tiledseg.training.preparing.preparation import (
    Preparation,
    check_compiling,
    prepare,
    with_class_weights,
    with_counts,
)
from tiledseg.training.resume.begin import Beginning, begin
from tiledseg.training.run_folder.check import check_run_folder, check_unchanged
from tiledseg.training.run_folder.metrics import check_lines, check_none_lost, read_metrics, write_whole
from tiledseg.training.run_folder.summary import About
from tiledseg.training.run_folder.validations import drop_validations
from tiledseg.training.stop import end_of_job
from tiledseg.training.trainer import Trainer
from tiledseg.user_files.machine import machine_here

FEWEST_STEPS = 100
"""Steps of a run below which there is a warning."""


@naming_disorder()
def start(config: Config, text: str, mesh: Mesh, files: Sequence[str] = (), command: str = "") -> int:
    """Run a configuration on a mesh; `text` is the configuration as YAML, read from `files` by `command`, as typed. The
    exit code. Collective.

    Every check comes before the first write; a failed one leaves no trace.
    """
    end = end_of_job(os.environ)
    make_deterministic(config.train.deterministic)  # first: what is timed below must run the kernels of the steps
    mesh.on_root(lambda: check_store(config.memory.offload, config.memory.store, mesh.device))
    _check_folders(config, mesh)
    memory = memory_per_rank(mesh)
    way = torch.device("cpu") if config.memory.in_file else mesh.device
    sharing = ranks_sharing(mesh, way)
    early: Checkpoint | None = mesh.on_root(lambda: _checkpoint_of(config)) if config.parallel.auto else None
    preparation: Preparation = mesh.on_root(lambda: _prepared(config, memory, mesh, sharing, early))
    mesh.on_root(lambda: check_compiling(preparation, mesh.device))
    preparation = replace(preparation, plan=with_times(preparation.question, preparation.plan, mesh))
    recipe = preparation.recipe
    mesh.on_root(lambda: _check_weights(preparation, mesh))
    folder = recipe.folder
    weights_file = [path for path in (recipe.pretrained,) if path and Path(path).exists()]  # gone: on resume
    inputs = [*preparation.files, *files, *weights_file]
    mesh.on_root(lambda: check_run_folder(folder, inputs))
    newest = mesh.on_root(lambda: newest_step(folder / CHECKPOINTS))
    beginning: Beginning = mesh.on_root(lambda: begin(early or _checkpoint_of(config), preparation))
    lines: list[dict[str, Any]] = []  # of metrics, on the root alone
    every = recipe.cadence.checkpoint_every
    lost = mesh.on_root(lambda: _check_metrics(folder, beginning.checkpoint, lines, every))
    fresh = recipe.pretrained if beginning.checkpoint is None else None
    first = first_weights(fresh, preparation.plan.network, mesh)
    if first is not None:
        beginning = replace(beginning, pretrained=first.origin, warnings=(*beginning.warnings, first.note))
    normalization, preparation = _looked(preparation, beginning, mesh)
    if recipe.by_content:
        preparation = _counted_by_place(preparation, mesh)
    with ExitStack() as stack:  # on the root: the lock is that of its process
        unlocked = mesh.on_root(lambda: stack.enter_context(hold(folder)))
        mesh.on_root(lambda: _claim(folder, text, beginning, newest))
        hosts = mesh.communicator.gather_objects(mesh.host)
        note = spread_note(preparation.plan.spread.mesh, hosts)
        notes = [warning for warning in (lost, note, unlocked) if warning]
        warnings = (*preparation.warnings, *beginning.warnings, *normalization.warnings(), *notes)
        if mesh.is_root:
            if preparation.found is not None:
                _progress(preparation).say(in_words(preparation.found, early.saved if early else None))
            _announce(preparation, beginning, warnings)
        freed = Freed.by(preparation.question, preparation.plan, mesh.device)
        if mesh.is_root and freed is not None:
            _progress(preparation).say(freed.in_words)
        weights = first.tensors if first else {}
        about = About(command, warnings, hosts)
        trainer = Trainer(mesh, preparation, normalization, beginning, weights, lines, about)
        if mesh.is_root:
            for warning in trainer.notes:
                _progress(preparation).say(f"warning: {warning}")
        with told_what_fits(preparation.question, preparation.plan), freed or nullcontext():
            code = trainer.run(end)
        took = freed.what_it_took() if mesh.is_root and freed is not None else None
        if took:
            _progress(preparation).say(took)
        return code


def _check_folders(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks where one of them, on a host of its own, cannot use the store."""
    refusal = None
    try:
        config.memory.check_folder()
    except ConfigError as error:
        refusal = f"rank {mesh.rank}: {error}" if mesh.rank else str(error)
    refusals = [said for said in mesh.communicator.gather_objects(refusal) if said]
    if refusals:
        raise mark_agreed(ConfigError(refusals[0]))


def _check_weights(preparation: Preparation, mesh: Mesh) -> None:
    """With their gradients, where nothing is known of stages and devices that hold less of them, and their average."""
    whole = preparation.question.parallel.stages == 1 and mesh.device.type == "cpu"
    copies = (2 if whole else 1) + (preparation.recipe.ema > 0)
    check_weights(preparation.plan.network, copies, preparation.recipe.precision, mesh)


def _prepared(config: Config, memory: int, mesh: Mesh, sharing: int, early: Checkpoint | None) -> Preparation:
    """On the root: what `parallel.auto` leaves to the program is found for the device that it runs on."""
    here = None
    if config.parallel.auto and config.parallel.machine is None:
        device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else None
        here = machine_here(device, mesh.launch.local_size)
    saved = early.saved if early else None
    return prepare(config, memory, mesh.size, here, saved, sharing, mesh.device)


def _checkpoint_of(config: Config) -> Checkpoint | None:
    """The checkpoint to go on from, or none to start anew."""
    folder = Path(config.run.output) / CHECKPOINTS
    match config.train.resume:
        case "never":
            if folder.is_dir() and any(folder.iterdir()):
                raise OutputError(
                    f"{folder} holds checkpoints and train.resume is never; give another run.output, or resume auto"
                )
            return None
        case "auto":
            return newest_checkpoint(folder)
        case path:
            checkpoint = find_checkpoint(path)
            _check_newest(checkpoint, folder)
            return checkpoint


def _check_metrics(
    folder: Path, checkpoint: Checkpoint | None, lines: list[dict[str, Any]], checkpoint_every: int
) -> str | None:
    """What is to be said of the lines of the steps done, which are put into `lines`; a checkpoint of another folder has
    its lines there."""
    if checkpoint is None:
        return check_none_lost(folder, checkpoint_every)
    lines += read_metrics(folder / METRICS)
    if checkpoint.path.parent.resolve() != (folder / CHECKPOINTS).resolve():
        return None
    return check_lines(folder / METRICS, checkpoint.saved.step, lines)


def _check_newest(checkpoint: Checkpoint, folder: Path) -> None:
    """The run's folder would hold two pasts, and the next resume would take the wrong one."""
    newest = newest_step(folder)
    if newest is not None and newest > checkpoint.saved.step:
        raise OutputError(
            f"train.resume is {checkpoint.path}, but {folder} holds the newer step-{newest:06d}; give another "
            "run.output, or resume auto"
        )


def _looked(preparation: Preparation, beginning: Beginning, mesh: Mesh) -> tuple[Normalization, Preparation]:
    """The normalisation, and the preparation with its classes' weights: of the checkpoint, whose network has learned
    with them; else measured. All labels that are new are looked at. Collective."""
    checkpoint, recipe = beginning.checkpoint, preparation.recipe
    count = recipe.counts_classes and not beginning.has_class_weights
    whole = checkpoint is None or count
    numbers = range(len(preparation.training.images)) if whole else beginning.added
    if not numbers:
        assert checkpoint is not None, "a new run looks at all its images"
        return checkpoint.saved.normalization, _with_weights_of(checkpoint, preparation)
    found = _survey(preparation, numbers, recipe.normalize and checkpoint is None, count, mesh)
    if checkpoint is None and not found.labelled:
        raise mark_agreed(
            LabelError(
                "no pixel of data.labels is of a class: all are data.ignore_index "
                f"({preparation.label_map.ignore_index}), without data or outside of what is trained on; look at "
                "data.labels, data.classes and data.area"
            )
        )
    if found.counts is not None:
        preparation = with_counts(preparation, found.counts)
    if checkpoint is not None:
        return checkpoint.saved.normalization, preparation if count else _with_weights_of(checkpoint, preparation)
    return imagenet(found.normalization) if recipe.imagenet else found.normalization, preparation


def _with_weights_of(checkpoint: Checkpoint, preparation: Preparation) -> Preparation:
    """With the weights of classes that the run has counted before, where it counts them."""
    weights = checkpoint.saved.class_weights
    return with_class_weights(preparation, weights) if preparation.recipe.counts_classes else preparation


def _survey(preparation: Preparation, numbers: Sequence[int], normalize: bool, count: bool, mesh: Mesh) -> Survey:
    rasters = preparation.training
    with ExitStack() as stack:
        images = [stack.enter_context(rasters.open_counted(number)) for number in numbers]
        labels = [stack.enter_context(rasters.open_labels(number)) for number in numbers]
        shown: Shown = unseen
        if mesh.is_root:
            shown = stack.enter_context(closing(StepProgress(0, 0, preparation.recipe.verbosity))).part
        return survey(mesh, images, labels, preparation.label_map, normalize, count, shown)


def _counted_by_place(preparation: Preparation, mesh: Mesh) -> Preparation:
    """The preparation with steps drawn by what the labels hold: counted in each run, also in one that goes on."""
    rasters, units = preparation.training, content_units(preparation)
    with ExitStack() as stack:
        numbers = range(len(rasters.labels))
        images = [stack.enter_context(rasters.open_counted(number)) for number in numbers]
        labels = [stack.enter_context(rasters.open_labels(number)) for number in numbers]
        counts = survey_content(mesh, units, images, labels, preparation.label_map)
    return with_content(preparation, units, counts)


def _claim(folder: Path, text: str, beginning: Beginning, newest: int | None) -> None:
    """Free the run's folder, which is locked, of what a crash has left, and put the resolved configuration into it."""
    checkpoint = beginning.checkpoint
    check_unchanged(folder, newest)
    clean_leftovers(folder / CHECKPOINTS)
    write_whole(folder / CONFIG, text)
    drop_validations(folder, checkpoint.saved.step if checkpoint is not None else 0)
    with writing(folder):
        if checkpoint is None:
            (folder / METRICS).unlink(missing_ok=True)
        else:
            drop_later(folder / CHECKPOINTS, checkpoint.saved.step)
        point_best(folder / CHECKPOINTS, beginning.best.step if beginning.best else None)


def _speed(preparation: Preparation) -> str:
    """That predicted time rests on: assumed, or measured where the plan may choose what lies in a store."""
    from tiledseg.planning.memory.choice import speed_with

    asked = preparation.question.blocks
    store = preparation.question.store or (asked.store if asked else None)
    return f"{'measured' if store else 'assumed'} {speed_with(store).in_words}"


def _progress(preparation: Preparation) -> StepProgress:
    return StepProgress(0, 0, min(preparation.recipe.verbosity, 2) and 2)


def few_steps(preparation: Preparation) -> str:
    """Words on a run that is too short to teach a network much; none on another."""
    an_epoch, epochs = preparation.sampler.steps_per_epoch, preparation.recipe.cadence.epochs
    if an_epoch * epochs >= FEWEST_STEPS:
        return ""
    return (
        f"the run has {counted(an_epoch * epochs, 'step')} in all ({an_epoch} an epoch), which teach a network little; "
        f"give train.epochs {-(-FEWEST_STEPS // an_epoch)} or more, or smaller steps (train.tiles_per_step)"
    )


def _announce(preparation: Preparation, beginning: Beginning, warnings: Sequence[str]) -> None:
    progress = _progress(preparation)
    for warning in filter(None, (*warnings, few_steps(preparation))):
        progress.say(f"warning: {warning}")
    plan = preparation.plan
    windows, (rows, cols) = preparation.question.windows, plan.tilings[0].grid
    cut = windows.in_words if windows else f"grid {rows} x {cols}"
    halo = "" if windows and not windows.exact else f", halo {plan.footprint.before} px"
    progress.say(f"{counted(len(preparation.training.images), 'image')}, {cut}{halo}")
    if preparation.chosen:
        steps, epochs = preparation.sampler.steps_per_epoch, preparation.recipe.cadence.epochs
        progress.say(
            f"steps as nobody says others: {preparation.question.tiles_per_step} of "
            f"{counted(sum(map(len, preparation.training.tilings)), 'tile')}, {steps} an epoch, "
            f"{counted(epochs, 'epoch')} (tiling.grid, train.tiles_per_step, train.epochs: docs/training.md)"
        )
    if plan.spread.shares_images:
        progress.say(f"halo mode {plan.spread.in_words}")
    if preparation.question.recomputes:
        progress.say(
            f"memory.recompute {preparation.question.recompute}: a step needs about {plan.memory / 2**20:.1f} MiB"
        )
    if plan.offloaded is not None:
        progress.say(f"offload: {plan.offloaded.in_words(store_in_words(preparation.recipe.store))}")
    if plan.blocks is not None:
        progress.say(f"blocks: {plan.blocks.in_words}, at {_speed(preparation)}")
    if plan.pipeline is not None:
        progress.say(f"pipeline of {plan.pipeline.in_words}, mesh {plan.spread.mesh}")
    if plan.rebuilt is not None:
        progress.say(f"{plan.rebuilt.in_words}, at {_speed(preparation)}")
    if preparation.class_weights:
        progress.say(f"weights of the classes: {', '.join(f'{weight:.4g}' for weight in preparation.class_weights)}")
    if beginning.checkpoint is not None:
        progress.say(f"resuming from {beginning.checkpoint.path}")
