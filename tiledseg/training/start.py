"""The start of a run: preparation, search for its checkpoint, survey of the data, claim of the output folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiledseg.architecture.network import Pretrainable
from tiledseg.checkpoint.folder import Checkpoint, find_checkpoint, newest_checkpoint, newest_step, rewind
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.data import IMAGENET
from tiledseg.config.run import Config
from tiledseg.errors import LabelError, OutputError
from tiledseg.execution.carrying import make_deterministic, naming_disorder
from tiledseg.execution.memory import check_weights, memory_per_rank
from tiledseg.execution.progress import StepProgress
from tiledseg.execution.survey import Survey, survey_content
from tiledseg.memory.device import is_gpu
from tiledseg.raster.labels.label_map import LabelMap, median_frequency_weights
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.content import Content
from tiledseg.raster.samples.sampling import Position
from tiledseg.raster.statistics import Normalization
from tiledseg.system.console import counted
from tiledseg.system.files import write_whole, writing
from tiledseg.system.freed_memory import keep_no_more
from tiledseg.system.outputs import CHECKPOINTS, CONFIG, METRICS, SUMMARY
from tiledseg.system.run_lock import hold
from tiledseg.training.choose_objective import weighted
from tiledseg.training.offloading import check_store, store_in_words, suggesting_settings
from tiledseg.training.preparation import Preparation
from tiledseg.training.resuming import begin
from tiledseg.training.run_files import check_metrics, check_run_folder, own_files, read_json, read_metrics
from tiledseg.training.run_journal import facts_of
from tiledseg.training.trainer import Trainer, end_of_job
from tiledseg.training.validation import BestSoFar

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
    mesh.on_all(config.memory.check_folder)  # each host has its own
    memory, folder = memory_per_rank(mesh), Path(config.run.output)
    run, newest, over = mesh.on_root(lambda: _look(config, memory, files, mesh))
    progress = StepProgress(0, 0, 2 if mesh.is_root and config.run.verbosity else 0)
    if over:
        progress.say(over)
        return 0
    survey_data(run, mesh)
    count_by_place(run, mesh)
    with ExitStack() as stack:  # the root holds the lock of the folder
        unlocked = mesh.on_root(lambda: stack.enter_context(hold(folder)))
        mesh.on_root(lambda: _claim(run, text, newest))
        hosts = mesh.communicator.gather_objects(mesh.host)
        run.warnings += filter(None, (idle_ranks(run, mesh.size), unlocked))
        plan, on_cpu = run.plan, mesh.device.type == "cpu"
        if run.question.budgeted and on_cpu and (plan.rebuilt is not None or plan.blocks is not None):
            keep_no_more(os.environ)
        started: dict[str, Any] = {}
        if mesh.is_root:
            started = facts_of(run, mesh, command, hosts)
            for line in _opening_lines(run):
                progress.say(line)
            if is_gpu(mesh.device) and config.train.precision == "fp32":
                progress.say("train.precision bf16 is many times as fast on a GPU (docs/how-to/gpu.md)")
        trainer = Trainer(mesh, run, started)
        with suggesting_settings(run.question, run.plan):
            return trainer.run(end)


def _look(config: Config, memory: int, files: Sequence[str], mesh: Mesh) -> tuple[Preparation, int | None, str]:
    """Make the checks that the root makes for all ranks. Return the run prepared for `memory` bytes a rank, its newest
    checkpoint's step, and a line if nothing is left to do."""
    check_store(config.memory.offload, config.memory.store, mesh.device)
    on_cpu, folder, pretrained = mesh.device.type == "cpu", Path(config.run.output), config.model.pretrained
    run = Preparation(config, memory, mesh.size, on_cpu)
    if run.compiles:
        from tiledseg.models.compiled import check_compiler

        check_compiler(mesh.device)
    # A CPU rank without stages holds weights and gradients; `train.ema` adds a copy.
    copies = (2 if run.question.parallel.stages == 1 and on_cpu else 1) + (config.train.ema > 0)
    check_weights(run.plan.network, copies, config.train.precision, mesh)
    weights_file = [pretrained] if pretrained and Path(pretrained).exists() else []
    check_run_folder(folder, [*run.files, *files, *weights_file])
    newest, checkpoint = newest_step(folder / CHECKPOINTS), _checkpoint_of(config)
    begin(checkpoint, run)
    every, over = config.train.checkpoint_every, ""
    if checkpoint is None:
        run.warnings += check_metrics(folder, None, every)
        if pretrained:
            from tiledseg.checkpoint.loading import load_pretrained

            assert isinstance(run.plan.network, Pretrainable), "presets refuse the key elsewhere"
            run.first_weights, run.pretrained, note = load_pretrained(pretrained, run.plan.network)
            run.warnings.append(note)
    elif checkpoint.path.parent.resolve() == (folder / CHECKPOINTS).resolve():
        run.warnings += check_metrics(folder, checkpoint.saved.step, every)
        over = _nothing_left(checkpoint, run)
    else:
        read_metrics(folder / METRICS)  # raises for damage
    return run, newest, over


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


def _nothing_left(checkpoint: Checkpoint, run: Preparation) -> str:
    """Return a line for the user if the run has a summary of its end and no step is left, else an empty string."""
    train, saved = run.config.train, checkpoint.saved
    summary = read_json(Path(run.config.run.output) / SUMMARY)
    if (summary.get("steps"), summary.get("finished")) != (saved.step, True):
        return ""
    done = f"nothing to do: {counted(saved.step, 'step')}, {counted(saved.position.epoch, 'epoch')}, are done"
    if saved.position.epoch >= run.epochs:
        return f"{done}; give train.epochs above {saved.position.epoch} to go on, or another run.output"
    if BestSoFar(train, run.label_map, run.best).gives_up(saved.position):
        return f"{done}, and train.early_stop has ended the run; give a larger one to go on, or another run.output"
    return ""


def _claim(run: Preparation, text: str, newest: int | None) -> None:
    """Clean the locked folder after a crash, and write the configuration."""
    folder, done = Path(run.config.run.output), run.checkpoint.saved.step if run.checkpoint else 0
    now = newest_step(folder / CHECKPOINTS)
    if now != newest:  # another run wrote between the first look and the lock
        raise OutputError(
            f"{folder} has been written by another run: its newest checkpoint was of step {newest} and is of step "
            f"{now}; run the command again"
        )
    write_whole(folder / CONFIG, text)
    with writing(folder):
        for step, path in own_files(folder):
            if step > done:
                path.unlink()
        rewind(folder / CHECKPOINTS, done, run.best.step if run.best else None)


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
    key = "a finer tiling.grid" if train.given_tiles is None else f"train.tiles_per_step {workers}"
    if preparation.question.windows:
        key = f"train.windows: per_step {workers}"
    return (
        f"{(workers - tiles) * stages} of {ranks} ranks are idle: a step has {counted(tiles, 'tile')}; give {key}, or "
        f"start {counted(tiles * stages, 'rank')}"
    )


def _opening_lines(preparation: Preparation) -> list[str]:
    """Return the lines printed before the first step: warnings, and how the run is cut, spread and kept in memory."""
    plan, question = preparation.plan, preparation.question
    lines = [f"warning: {warning}" for warning in (*preparation.warnings, few_steps(preparation)) if warning]
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
        lines.append(f"blocks: {plan.blocks.in_words}")
    if plan.pipeline is not None:
        lines.append(f"pipeline of {plan.pipeline.in_words}, mesh {plan.spread.mesh}")
    if plan.rebuilt is not None:
        lines.append(plan.rebuilt.in_words)
    if preparation.class_weights:
        lines.append(f"weights of the classes: {', '.join(f'{weight:.4g}' for weight in preparation.class_weights)}")
    if preparation.checkpoint is not None:
        lines.append(f"resuming from {preparation.checkpoint.path}")
    return lines


# Red, green and blue of ImageNet, scaled to 0..1, from torchvision's documentation of its weights.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def survey_data(run: Preparation, mesh: Mesh) -> None:
    """Give a run its normalisation and class weights: the checkpoint's, or measured. The labels of all new images are
    checked. Collective."""
    new, count = run.checkpoint is None, run.counts_classes and not run.class_weights
    numbers = range(len(run.training.images)) if new or count else run.added
    if numbers:
        with ExitStack() as stack:
            images, labels = _opened(run, numbers, stack)
            verbosity = run.config.run.verbosity if mesh.is_root else 0
            shown = stack.enter_context(closing(StepProgress(0, 0, verbosity))).part
            normalize = new and run.config.data.normalize is not False
            result = Survey(mesh, images, labels, run.label_map, normalize, count, shown)
        if new:
            run.normalization = _scaled(result.normalization, run.config.data.normalize)
            run.warnings += _unlabelled(result, run.label_map)
        if result.counts is not None:
            absent = [str(k) for k, pixels in enumerate(result.counts.sum(axis=0).tolist()) if not pixels]
            if absent:
                run.warnings.append(f"no training pixel is of class {', '.join(absent)}: its weight in the loss is 1")
            run.class_weights = median_frequency_weights(result.counts)
    assert run.normalization is not None, "a run has images"
    run.warnings += run.normalization.warnings()
    if run.counts_classes:
        run.objective = weighted(run.objective, run.class_weights)


def _unlabelled(found: Survey, label_map: LabelMap) -> list[str]:
    """Return a warning if a class has no label while pixels are not counted. Raises LabelError without any label."""
    if not found.labels.any():
        raise mark_agreed(
            LabelError(
                "no pixel of data.labels is of a class: all are data.ignore_index "
                f"({label_map.ignore_index}), without data or outside the training area; check "
                "data.labels, data.classes and data.area"
            )
        )
    absent, number = [str(k) for k, pixels in enumerate(found.labels.tolist()) if not pixels], label_map.ignore_index
    if not (absent and found.unlabelled):
        return []
    return [
        f"no label has class {', '.join(absent)}, and {found.unlabelled:,} label pixels are not counted: they "
        f"are {number} or without data; if {number} is a class, give it in data.classes by its values "
        "(docs/how-to/own-data.md)"
    ]


def _scaled(measured: Normalization, normalize: bool | str) -> Normalization:
    """Return the normalisation, by `data.normalize` imagenet of the first three bands with ImageNet's numbers."""
    if normalize != IMAGENET:
        return measured
    mean, deviation = (tuple(255 * value for value in values) for values in (MEAN, DEVIATION))
    constant = tuple(band for band in measured.constant if band >= len(MEAN))
    rest = {"mean": (*mean, *measured.mean[len(mean) :]), "std": (*deviation, *measured.std[len(deviation) :])}
    return replace(measured, constant=constant, **rest)


def count_by_place(preparation: Preparation, mesh: Mesh) -> None:
    """Let the steps of a run be drawn by their labels, which each run and resumed run counts anew. Collective. Raises
    ConfigError if too few tiles or windows are left."""
    steps, rules = preparation.sampler, preparation.by_content
    if rules is None:
        return
    units = steps.units()
    with ExitStack() as stack:
        images, labels = _opened(preparation, range(len(preparation.training.labels)), stack)
        counts = survey_content(mesh, units, images, labels, preparation.label_map)
    content = Content(tuple(region for unit in units for region in unit), counts, rules)
    preparation.sampler = replace(steps, content=content)


def _opened(
    preparation: Preparation, numbers: Sequence[int], stack: ExitStack
) -> tuple[list[RasterReader], list[RasterReader]]:
    """Open images and labels; the stack closes them."""
    rasters = preparation.training
    images = [stack.enter_context(rasters.open_counted(number)) for number in numbers]
    return images, [stack.enter_context(rasters.open_labels(number)) for number in numbers]
