"""From a configuration to a running trainer: prepare, find what to resume, survey the data, claim the output folder."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.config import Config
from tiledseg.config_checks import shown
from tiledseg.errors import CheckpointError, OutputError
from tiledseg.files import irregular_kind
from tiledseg.models.unet import FlatNetwork
from tiledseg.pipeline.layer_times import LayerTime, measure_layer_times
from tiledseg.pipeline.link_time import Link, slowest_link
from tiledseg.raster.reader import open_raster
from tiledseg.raster.statistics import Normalization
from tiledseg.training.checkpoint import (
    Checkpoint,
    clean_leftovers,
    drop_later,
    find_checkpoint,
    newest_checkpoint,
    newest_step,
)
from tiledseg.training.memory import memory_per_rank
from tiledseg.training.pipeline_plan import Measured, PipelinePlan, plan_pipeline, spread_note
from tiledseg.training.precision import PARAMETER_DTYPES, make_deterministic
from tiledseg.training.preparation import Preparation, prepare
from tiledseg.training.progress import StepProgress
from tiledseg.training.report import METRICS, read_metrics, write_whole
from tiledseg.training.survey import survey
from tiledseg.training.trainer import Trainer, sampling_fingerprint


def start(config: Config, text: str, mesh: Mesh) -> int:
    """Run a configuration on a mesh; `text` is the configuration as YAML. The exit code. Collective.

    Every check comes before the first write; a failed one leaves no trace.
    """
    make_deterministic(config.train.deterministic)  # first: what is timed below must run the kernels of the steps
    memory = memory_per_rank(mesh)
    preparation: Preparation = mesh.on_root(lambda: prepare(config, memory, mesh.size))
    pipeline = _plan_pipeline(config, preparation, memory, mesh)
    folder = Path(config.run.output)
    mesh.on_root(lambda: check_folder(folder))
    checkpoint: Checkpoint | None = mesh.on_root(lambda: _find_resume(config, preparation))
    mesh.on_root(lambda: check_contents(folder, checkpoint is not None))
    normalization = _normalization(config, preparation, checkpoint, mesh)
    mesh.on_root(lambda: _claim(folder, text, checkpoint))
    note = spread_note(preparation.halo.mesh, mesh.communicator.gather_objects(mesh.host))
    if mesh.is_root:
        _announce(config, preparation, normalization, checkpoint, pipeline, note)
    return Trainer(config, mesh, preparation, normalization, checkpoint, pipeline).run()


def _plan_pipeline(config: Config, preparation: Preparation, memory: int, mesh: Mesh) -> PipelinePlan | None:
    """The pipeline; for `balance: auto` by the times of layers on the root, and of messages. Collective."""
    network, parallel = preparation.network, config.parallel
    link: Link | None = None
    if parallel.stages > 1 and parallel.balance == "auto":
        link = slowest_link(mesh.communicator, preparation.halo.mesh, mesh.device)

    def decide() -> PipelinePlan | None:
        measured = Measured(_layer_times(config, preparation, mesh.device), link) if link else None
        return plan_pipeline(parallel, network.layers(), network.bands, preparation.micro_batch, memory, measured)

    return mesh.on_root(decide)


def _layer_times(config: Config, preparation: Preparation, device: torch.device) -> tuple[LayerTime, ...]:
    network, precision = preparation.network, config.train.precision
    with torch.device("meta"):
        described = FlatNetwork(network.layers(), network.bands)
    cast = torch.bfloat16 if precision == "bf16" else None
    pixels = preparation.micro_batch.pixels
    return measure_layer_times(described, network.bands, pixels, device, PARAMETER_DTYPES[precision], cast)


def _find_resume(config: Config, preparation: Preparation) -> Checkpoint | None:
    """The checkpoint to go on from, checked to fit this run; None to start anew."""
    folder = Path(config.run.output) / "checkpoints"
    match config.train.resume:
        case "never":
            if folder.exists() and any(folder.iterdir()):
                raise OutputError(
                    f"{folder} holds checkpoints and train.resume is never; give another run.output, or resume auto"
                )
            return None
        case "auto":
            checkpoint = newest_checkpoint(folder)
        case path:
            checkpoint = find_checkpoint(path)
            _check_newest(checkpoint, folder)
    if checkpoint is not None:
        _check_fits(checkpoint, config, preparation)
    return checkpoint


def _check_newest(checkpoint: Checkpoint, folder: Path) -> None:
    """The run's folder would hold two pasts, and the next resume would take the wrong one."""
    newest = newest_step(folder)
    if newest is not None and newest > checkpoint.saved.step:
        raise OutputError(
            f"train.resume is {checkpoint.path}, but {folder} holds the newer step-{newest:06d}; give another "
            "run.output, or resume auto"
        )


def _check_fits(checkpoint: Checkpoint, config: Config, preparation: Preparation) -> None:
    here = asdict(preparation.network)
    for key, value in asdict(checkpoint.saved.network).items():
        if here.get(key) != value:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {key} is {value} there and {here.get(key)} in this run; "
                "use the same model and data keys, or another run.output"
            )
    saved, own = checkpoint.saved.sampling, sampling_fingerprint(config, preparation)
    different = [key for key in own if saved.get(key) != own[key]]
    if different and checkpoint.saved.position.step > 0:
        key = different[0]
        raise CheckpointError(
            f"{checkpoint.path} stands in the middle of an epoch of other steps: {key} is {saved.get(key)} there and "
            f"{own[key]} in this run; use the same, or another run.output"
        )
    position = checkpoint.saved.next_position
    if position > (config.train.epochs, 0):
        done = f"{position.epoch} epochs" + (f" and {position.step} steps" if position.step else "")
        raise CheckpointError(
            f"{checkpoint.path} has done {done}, but train.epochs is {config.train.epochs}; give at least "
            f"{position.epoch + (position.step > 0)}, or another run.output"
        )
    name = checkpoint.saved.config.optimizer.name
    if name != config.optimizer.name:
        raise CheckpointError(
            f"{checkpoint.path} is of another optimizer: optimizer.name is {name} there and {config.optimizer.name} in "
            "this run; use the same, or another run.output"
        )


def _normalization(
    config: Config, preparation: Preparation, checkpoint: Checkpoint | None, mesh: Mesh
) -> Normalization:
    """Of the checkpoint, whose weights have learned with it; else measured."""
    if checkpoint is not None:
        return checkpoint.saved.normalization
    data, rasters = config.data, preparation.training
    with ExitStack() as stack:
        images = [stack.enter_context(open_raster(p, data.bands, data.nodata, data.references)) for p in rasters.images]
        labels = [stack.enter_context(open_raster(p, references=data.references)) for p in rasters.labels]
        return survey(mesh, images, labels, preparation.label_map, data.normalize)


def check_folder(folder: Path) -> None:
    """Raise OutputError where the run's folder cannot be made or written."""
    try:
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    except OSError as error:  # a name that is too long, say
        raise OutputError(f"run.output is {shown(str(folder))}: {error.strerror}; give another folder") from None
    if not existing.is_dir():
        raise OutputError(f"run.output is {folder}, but {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"run.output is {folder}, but {existing} is not writable; give another folder")


def check_contents(folder: Path, resumed: bool) -> None:
    """Raise OutputError where what the folder holds is not what a run writes there, or damaged where it goes on."""
    for name in ("checkpoints", "events"):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise OutputError(f"{folder / name} is a file, where a run keeps a folder; move it away")
    for name in (METRICS, "config.yaml", "summary.json", "progress.png"):
        kind = irregular_kind(folder / name)
        if kind is not None:
            raise OutputError(f"{folder / name} is {kind}, where a run writes a file; move it away")
    if resumed:
        read_metrics(folder / METRICS)


def _claim(folder: Path, text: str, checkpoint: Checkpoint | None) -> None:
    """Make the run's folder, free of what a crash has left, with the resolved configuration in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean_leftovers(folder / "checkpoints")
        if checkpoint is None:
            (folder / METRICS).unlink(missing_ok=True)
        else:
            drop_later(folder / "checkpoints", checkpoint.saved.step)
        write_whole(folder / "config.yaml", text)
    except OSError as error:
        raise OutputError(f"cannot write into {folder}: {error.strerror}; give another run.output") from error


def _announce(
    config: Config,
    preparation: Preparation,
    normalization: Normalization,
    checkpoint: Checkpoint | None,
    pipeline: PipelinePlan | None,
    note: str | None,
) -> None:
    progress = StepProgress(0, 0, min(config.run.verbosity, 2) and 2)
    for warning in (*preparation.warnings, *normalization.warnings(), *([note] if note else [])):
        progress.say(f"warning: {warning}")
    rows, cols = preparation.training.tilings[0].grid
    halo = preparation.footprint.before
    progress.say(f"{len(preparation.training.images)} images, grid {rows} x {cols}, halo {halo} px")
    if preparation.halo.halo != "read":
        progress.say(f"halo mode {preparation.halo.in_words}")
    if pipeline is not None:
        progress.say(f"pipeline of {pipeline.in_words}, mesh {preparation.halo.mesh}")
    if checkpoint is not None:
        for fault in checkpoint.passed_over:
            progress.say(f"warning: {fault.partition('; use')[0]}")
        progress.say(f"resuming from {checkpoint.path}")
