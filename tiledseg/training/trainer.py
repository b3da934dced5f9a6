"""The training loop: steps, validations and checkpoints of one run, on every rank of a mesh."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.architecture.presets import described
from tiledseg.checkpoint.folder import contents_of, name_of, save_checkpoint
from tiledseg.checkpoint.loading import load_average, load_network, load_optimizer
from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.comm.doing import doing
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError
from tiledseg.execution.agreement import agree_on_buffers, check_agreement, check_finite, collect
from tiledseg.execution.carrying import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.part_passes import read_ahead
from tiledseg.execution.progress import unseen
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.tiling import Tile
from tiledseg.models.frozen import freeze
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import Position
from tiledseg.system.files import write_whole
from tiledseg.system.outputs import CHECKPOINTS, PAGE, SUMMARY
from tiledseg.system.signals import STOPPED, deferring, is_met
from tiledseg.tracing.build import network_modules
from tiledseg.training.offloading import hooks_of, moved_by_ranks, offload_to, store_in_words
from tiledseg.training.optimizer import (
    AveragedWeights,
    Course,
    build_optimizer,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)
from tiledseg.training.preparation import Preparation
from tiledseg.training.raster_set import RasterSet
from tiledseg.training.resuming import rewritten_notes, sampling_fingerprint, sources_of
from tiledseg.training.run_journal import Journal, seconds_so_far
from tiledseg.training.step import Stepper
from tiledseg.training.validation import BestSoFar, choose_views, validate, write_validation

# The job's end in Unix seconds: set by our batch scripts, and by newer Slurm.
_END_TIMES = ("TILEDSEG_END_TIME", "SLURM_JOB_END_TIME")
_SPARE = 30.0  # seconds to write the last checkpoint and end all processes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the job's end in Unix seconds; None if it is not set. Raises ConfigError if it is no number."""
    for name in _END_TIMES:
        if said := environ.get(name):
            if said.isdecimal():
                return float(said)
            raise ConfigError(f"{name} is '{said}'; give Unix seconds, as date +%s prints them, or unset it")
    return None


class StopFlag:
    """A flag that asks the run to stop: set by a deferred signal (`system.signals`), or when the job's `end` (Unix
    seconds) is nearer than two of the longest steps so far. A run reads it once a step; the time of a step includes its
    checkpoint and validation. Ranks may see it set at different steps: the step sums the flags of all ranks."""

    def __init__(self, end: float | None = None) -> None:
        self.end, self._before, self._longest = end, time.time(), 0.0

    @property
    def is_set(self) -> bool:
        now = time.time()
        self._before, self._longest = now, max(self._longest, now - self._before)
        return is_met() or (self.end is not None and now + 2 * self._longest + _SPARE > self.end)


class Trainer:
    """A run's network, optimizer and position. Build it on every rank with the same arguments, then `run()`."""

    def __init__(self, mesh: Mesh, preparation: Preparation, started: Mapping[str, Any]) -> None:
        """`started`: on the root, the facts of the summary that are known now."""
        assert preparation.normalization is not None, "pixels have been surveyed"
        self.mesh, self.preparation, self.normalization = mesh, preparation, preparation.normalization
        self.config, self.plan, self.sampler = preparation.config, preparation.plan, preparation.sampler
        self.started = dict(started)
        config, plan, train, checkpoint = self.config, self.plan, self.config.train, preparation.checkpoint
        self.judged = sources_of(preparation.validation) if mesh.is_root and preparation.validation is not None else ()
        self.network = self._build_network()
        if config.model.freeze_norm:
            self.network.hold_statistics()
        self.offload = offload_to(config.memory.store, plan.offloaded, mesh)
        policy = plan.rebuilt.policy if plan.rebuilt else None
        policy = policy or named_policy(self.network.graph, preparation.question.recompute)
        self.network.follow(policy, hooks_of(self.offload))
        self.parallel = ParallelRun(
            plan.spread,
            self.network,
            mesh,
            train.precision,
            plan.pipeline,
            plan.blocks.shape if plan.blocks else None,
            config.memory.store,
            preparation.compiles,
        )
        groups = parameter_groups(self.network.parameters_by_node(), config.optimizer)
        self.optimizer = build_optimizer(groups, config.optimizer)
        self.folder = Path(config.run.output)
        self.checkpoints = self.folder / CHECKPOINTS
        self.step, self.position = 0, Position(0, 0)
        self.course = Course(preparation.epochs, self.sampler.steps_per_epoch)
        self.saved = False  # the run's folder has a checkpoint of the current step
        scale = LossScale()
        average: Iterable[tuple[str, torch.Tensor]] = ()
        if checkpoint is not None:
            load_optimizer(checkpoint, self.optimizer, mesh)
            saved, scale = checkpoint.saved, checkpoint.saved.loss_scale or scale
            self.step, self.position = saved.step, saved.position
            self.saved = checkpoint.path.parent.resolve() == self.checkpoints.resolve()
            average = load_average(checkpoint, mesh) if train.ema else ()
        self.best = BestSoFar(train, preparation.label_map, preparation.best)
        self.average = AveragedWeights(self.network, train.ema, average) if train.ema else None
        self.passes = self.parallel.over(plan.tilings, plan.tiles_per_batch)
        self.stepper = Stepper(
            self.optimizer,
            mesh,
            self.passes,
            self.parallel.axes,
            preparation.objective,
            train.seed,
            scale if train.precision == "fp16" else None,
            config.optimizer.clip_norm,
            train.deterministic,
            train.largest_loss,
        )
        self.stepper.paths = preparation.training.images
        self.journal: Journal | None = None  # on the root, from `run` on

    def _build_network(self) -> GraphNetwork:
        """Build the network with its weights: from the checkpoint, from a file, or drawn by the seed."""
        model, train, plan, checkpoint = self.config.model, self.config.train, self.plan, self.preparation.checkpoint
        built = network_modules(plan.network, train.seed, still=model.freeze_norm)
        network = built.to(PARAMETER_DTYPES[train.precision])
        if checkpoint is not None:
            load_network(checkpoint, network, mesh=self.mesh)
        elif isinstance(plan.network, ForeignNetwork):
            check_agreement(network, self.mesh, self.mesh.communicator, plan.network.build)
        elif self.preparation.first_weights:
            network.load_state_dict(self.preparation.first_weights, strict=False)  # of the encoder alone
        freeze(network, self.config.optimizer.lr_factors)
        verifies = built.recorded is not None and model.verify
        kept = plan.pipeline is not None and self.mesh.is_root  # a stage drops the layers of the others
        self.unverified = None if not verifies else copy.deepcopy(built) if kept else built
        return network

    def run(self, end: float | None = None) -> int:
        """Train to the end, a wall-time signal, or the job's `end` (Unix seconds); return 0 or 75. Collective."""
        begun = time.perf_counter()
        before = seconds_so_far(self.folder) if self.mesh.is_root and self.saved else 0.0
        with deferring(), contextlib.ExitStack() as stack:
            stack.callback(self.stepper.close)
            if self.mesh.is_root:
                total, facts = self.step + self.course.left(self.position), {**self.started, "seconds_before": before}
                self.journal = Journal(self.folder, self.step, total, self.config.run.verbosity, facts)
                stack.enter_context(contextlib.closing(self.journal))
            training, held_out = (
                stack.enter_context(contextlib.closing(self._dataset(rasters))) if rasters is not None else None
                for rasters in (self.preparation.training, self.preparation.validation)
            )
            assert training is not None, "a run has images"
            if self.offload is not None:
                stack.enter_context(self.offload)
            stopped = self._loop(training, held_out, StopFlag(end))
            moved = moved_by_ranks(self.offload, self.config.memory.store, self.mesh)
            notes = rewritten_notes(self.preparation.sources, self.judged) if self.mesh.is_root else []
            self.started["warnings"] = [*self.started.get("warnings", ()), *notes]
            early = (
                f"stopped early after step {self.step}, by a signal or because the job's time ends; its checkpoint is "
                "written: run the command again to go on"
            )
            if moved:
                out, back = (f"{moved[key] / 2**20:.1f} MiB" for key in ("bytes_out", "bytes_in"))
                self._say(f"offload: {out} went to {store_in_words(moved['store'])}, {back} came back")
            for line in (early if stopped else "", *(f"warning: {note}" for note in notes)):
                self._say(line)
        self.parallel.close()
        if self.journal is not None:
            summary = {
                **self.started,
                "offloaded": moved,
                "steps": self.step,
                "epochs": self.position.epoch,
                "finished": not stopped,
                "stopped_early": self.best.gives_up(self.position),
                "seconds": before + time.perf_counter() - begun,
                "val": self.journal.last_validation,
                **self._history(),
            }
            write_whole(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
            self.journal.draw(now=True)
            page, best = self.folder / PAGE, self.best.best
            files = [f"report {page}"] if page.is_file() else []
            files.append(f"checkpoint {self.checkpoints / name_of(self.step)}")
            if best is not None:
                files.append(f"best {self.checkpoints / name_of(best.step)} ({best.score} {best.value:.4f})")
            self._say(f"wrote {', '.join(files)}")
        return STOPPED if stopped else 0

    def _say(self, line: str) -> None:
        if self.journal is not None and line:
            self.journal.progress.say(line)

    def _loop(self, training: Dataset, held_out: Dataset | None, flag: StopFlag) -> bool:
        """Run all steps from the position on; return True if they were stopped early."""
        config, tilings = self.config, self.plan.tilings
        steps, ahead = itertools.tee(
            (position, step, self.passes.mode.share(step))
            for position, step in self.sampler.steps_from(self.position, self.course.epochs)
        )
        mine = (part for _, _, parts in ahead for _ in range(self.stepper.rounds(parts)) for part in parts)
        samples = read_ahead(self.passes, training, mine, config.data.workers)
        heaviest = max((1.0, *self.preparation.class_weights))
        self.network.train()
        if self.best.gives_up(self.position):
            steps = iter(())
        with contextlib.closing(samples):  # type: ignore[type-var]
            for position, step, parts in steps:
                if self.unverified is not None:
                    from tiledseg.tracing.compare import verify_first

                    traced, self.unverified = self.unverified.train(), None  # compared with its module
                    how = self.mesh, config.train.precision, self.preparation.question.memory, self._say
                    verify_first(traced, training, parts, tilings, *how)
                rate = learning_rate(config.optimizer, self.step, self.course, position)
                set_learning_rate(self.optimizer, rate)
                tiles = (one.tile if isinstance(one.tile, Tile) else tilings[one.image].tiles[one.tile] for one in step)
                weight = heaviest * sum(tile.core.area for tile in tiles)
                with doing("step %d", self.step + 1):
                    figures, stop = self.stepper.run(self.step, samples, parts, flag.is_set, weight)
                agree_on_buffers(self.network, self.parallel.axes.weights, self.passes.mode.speaks(parts))
                self.step, self.position, self.saved = self.step + 1, self.course.after(position), False
                if self.average is not None and not figures.get("skipped"):
                    self.average.update(self.step)
                if self.journal is not None:
                    of_step = {"step": self.step, "epoch": position.epoch, "lr": rate, "tiles": len(step)}
                    self.journal.step({**of_step, **figures})
                train, epoch, better = config.train, position.epoch, False
                if self.position.epoch > epoch and (epoch + 1) % train.validate_every == 0 and held_out is not None:
                    better = self._validate(held_out, epoch)
                last = not self.course.left(self.position) or self.best.gives_up(self.position)
                if last or better or stop or self.step % train.checkpoint_every == 0:
                    self._checkpoint()
                if last:
                    break
                if stop:
                    return True
        if not self.saved:
            self._checkpoint()  # resumed from another folder's checkpoint, with no step left
        return False

    def _validate(self, held_out: Dataset, epoch: int) -> bool:
        """Validate; return True on all ranks if the score is the best so far."""
        label_map, config, rasters = self.preparation.label_map, self.config, self.preparation.validation
        assert rasters is not None, "there are rasters held out"
        shapes, counted = [tiling.raster for tiling in rasters.tilings], [part.boxes for part in rasters.parts]
        views = choose_views(shapes, 4, config.train.seed, counted)
        passes = self.parallel.over(held_out.tilings, spread=self.plan.validation)
        threads, shown = config.data.workers, self.journal.progress.part if self.journal else unseen
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            findings = validate(self.network, held_out, self.mesh, passes, threads, views, shown)
        if self.journal is not None:
            of_images = label_map, rasters.images, rasters.infos[0].dtype, self.normalization
            panel = write_validation(self.folder, self.step, epoch, findings, *of_images)
            self.journal.validation(self.step, epoch, findings.line(), panel)
        return self.best.takes(findings, self.step, epoch)

    def _checkpoint(self) -> None:
        """Write a checkpoint, without random state: draws depend on seed and step alone."""
        axes, best = self.parallel.axes, self.best.best
        check_finite(self.network, self.optimizer, self.mesh, self.step)
        check_agreement(self.network, self.mesh, axes.weights)
        self.saved = True
        if self.mesh.rank >= axes.shape.stages and not self.mesh.is_root:
            return
        state = {
            "config": self.preparation.user_config.record(),
            "network": described(self.plan.network),
            "normalization": asdict(self.normalization),
            "class_weights": list(self.preparation.class_weights),
            "position": self.position._asdict(),
            "sources": [asdict(source) for source in self.preparation.sources],
            "judged": [asdict(source) for source in self.judged],
            "sampling": sampling_fingerprint(self.preparation),
            "step": self.step,
            "loss_scale": self.stepper.scale and asdict(self.stepper.scale),
            **self._history(),
        }
        average = self.average.tensors if self.average is not None else None
        contents = collect(contents_of(self.network, self.optimizer, average), axes)
        if contents is None:
            return
        with doing("writing a checkpoint"):
            save_checkpoint(
                self.checkpoints, contents, state, self.config.train.keep_checkpoints, best.step if best else None
            )
        if self.journal is not None:
            self.journal.draw()

    def _history(self) -> dict[str, Any]:
        """Return the run's resumptions, first weights and best validation, for checkpoint and summary."""
        return {
            "resumed": [asdict(resumed) for resumed in self.preparation.resumed],
            "pretrained": self.preparation.pretrained and asdict(self.preparation.pretrained),
            "best": self.best.best and asdict(self.best.best),
        }

    def _dataset(self, rasters: RasterSet) -> Dataset:
        return Dataset(
            [rasters.open_image(number) for number in range(len(rasters.images))],
            [rasters.open_labels(number) for number in range(len(rasters.labels))],
            rasters.tilings,
            self.preparation.label_map,
            self.normalization,
            INPUT_DTYPES[self.config.train.precision],
            self.preparation.objective.margin,
        )
