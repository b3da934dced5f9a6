"""The training loop: steps, validations and checkpoints of one run, on every rank of a mesh."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.kinds import described
from tiledseg.checkpoint.check import Checkpoint
from tiledseg.checkpoint.folder import name_of
from tiledseg.checkpoint.loading import load_average, load_network, load_optimizer
from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing
from tiledseg.execution.agreement import agree_on_buffers, check_agreement, check_drawn_alike, check_finite
from tiledseg.execution.halos.part import Part
from tiledseg.execution.input.carrying import network_input
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import read_ahead
from tiledseg.execution.precision import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.progress import unseen
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.tiling import Tile
from tiledseg.models.frozen import freeze, still_note
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.raster.samples.sampling import DrawnStep, Position
from tiledseg.raster.statistics import Normalization
from tiledseg.system.console import counted
from tiledseg.system.outputs import PAGE
from tiledseg.tracing.build import network_modules
from tiledseg.training.averaging import AveragedWeights
from tiledseg.training.best import BestSoFar
from tiledseg.training.offloading import Moved, hooks_of, moved_by_ranks, offload_to
from tiledseg.training.panels import Panels, choose_views
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.training.preparing.raster_set import RasterSet
from tiledseg.training.resume.begin import Beginning, sampling_fingerprint
from tiledseg.training.resume.sources import rewritten_notes, sources_of
from tiledseg.training.run_folder.journal import Journal, expected_time, step_line
from tiledseg.training.run_folder.metrics import write_whole
from tiledseg.training.run_folder.summary import About, facts_of, scene_of, seconds_so_far
from tiledseg.training.saving import CopyPlan, Saver, copy_plan
from tiledseg.training.steps.culprit import DivergedError, named
from tiledseg.training.steps.optimizer import (
    Course,
    build_optimizer,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)
from tiledseg.training.steps.step import Stepper, StepResult, StepRules
from tiledseg.training.stop import EXIT_CODE, StopFlag


class Trainer:
    """One run. Build it on every rank with the same arguments, then `run()`."""

    def __init__(
        self,
        mesh: Mesh,
        preparation: Preparation,
        normalization: Normalization,
        beginning: Beginning,
        first_weights: Mapping[str, torch.Tensor] | None = None,
        lines: Sequence[dict[str, Any]] = (),
        about: About | None = None,
    ) -> None:
        """`first_weights`: by name, where no checkpoint has them; `lines`: of metrics, on the root; `about`: what the
        summary says of the start."""
        self.recipe = recipe = preparation.recipe
        self.mesh = mesh
        self.preparation = preparation
        self.plan = plan = preparation.plan
        self.normalization = normalization
        self.beginning = beginning
        self.lines = lines
        self.judged = sources_of(preparation.validation) if mesh.is_root and preparation.validation is not None else ()
        self.about = about or About()
        checkpoint = beginning.checkpoint
        network = network_modules(plan.network, recipe.seed, still=recipe.still_norms)
        self.network = network.to(PARAMETER_DTYPES[recipe.precision])
        if checkpoint is not None:
            load_network(checkpoint, self.network, mesh=mesh)
        elif isinstance(plan.network, ForeignNetwork):
            check_drawn_alike(self.network, mesh, plan.network.build)
        elif first_weights:
            self.network.load_state_dict(first_weights, strict=False)  # of its encoder
        freeze(self.network, recipe.update.lr_factors)
        self.copy: CopyPlan = copy_plan(preparation, mesh.device)
        still = still_note(self.network.hold_statistics()) if recipe.still_norms else None
        self.notes = tuple(note for note in (still, self.copy.note) if note)
        self.about = replace(self.about, warnings=(*self.about.warnings, *self.notes))
        verifies = network.recorded is not None and recipe.verify
        # Stages let go of what is not theirs.
        kept = plan.pipeline is not None and mesh.is_root
        self.unverified = None if not verifies else copy.deepcopy(network) if kept else network
        policy = plan.rebuilt.policy if plan.rebuilt else None
        graph, bands = self.network.graph, self.network.bands
        self.offload = offload_to(recipe.store, plan.offloaded, plan.pipeline is not None, mesh)
        self.network.follow(policy or named_policy(graph, bands, recipe.recompute), hooks_of(self.offload))
        blocks = plan.blocks.shape if plan.blocks else None
        opened = plan.spread, self.network, mesh, recipe.precision, plan.pipeline, blocks, recipe.store, recipe.compiles
        self.parallel = ParallelRun.open(*opened)
        self.optimizer = build_optimizer(
            parameter_groups(self.network.parameters_by_node(), recipe.update), recipe.update
        )
        self.sampler = preparation.sampler
        self.folder = recipe.folder
        self.step, self.seconds_before = 0, 0.0
        self.position = Position(0, 0)
        self.course = Course(recipe.cadence.epochs, self.sampler.steps_per_epoch)
        self.checkpoints = self.folder / "checkpoints"
        keep = recipe.cadence.keep_checkpoints
        self.saver = Saver(self.checkpoints, keep, self.parallel.axes, self.copy.fits)
        self.saved_in: Path | None = None  # where a checkpoint of this very step lies
        if checkpoint is not None:
            self._resume(checkpoint)
        self.best = BestSoFar(recipe.cadence.judge, beginning.best, recipe.cadence.validate_every)
        average = load_average(checkpoint, mesh) if checkpoint is not None and recipe.ema else ()
        self.average = AveragedWeights(self.network, recipe.ema, average) if recipe.ema else None
        self.passes = self.parallel.over(plan.tilings, plan.tiles_per_batch)
        ignored, largest = preparation.label_map.ignore_index, recipe.cadence.largest_loss
        rules = StepRules(
            ignored, recipe.seed, recipe.update.clip_norm, recipe.wide_sums, preparation.objective, largest
        )
        self.stepper = Stepper(self.optimizer, mesh, self.passes, self.parallel.axes, rules, self._loss_scale())
        self.panels = self._panels()
        self.journal: Journal | None = None  # on the root, while the run goes on

    def run(self, end: float | None = None) -> int:
        """Train to the end, to a wall-time signal, or until the job's `end` (Unix seconds) is near; the exit code (0 or
        75). Collective."""
        begun = time.perf_counter()
        with StopFlag(end) as flag, contextlib.ExitStack() as stack:
            stack.callback(self.stepper.close)
            stack.callback(self.saver.wait)
            if self.mesh.is_root:
                checkpoint = self.beginning.checkpoint  # of this very folder, or of another run's
                own = checkpoint is not None and checkpoint.path.parent.resolve() == self.checkpoints.resolve()
                self.seconds_before = seconds_so_far(self.folder) if own else 0.0
                total, verbosity = self.course.total_steps, self.recipe.verbosity
                started = {**self._started(), "seconds_before": self.seconds_before}
                scene = scene_of(self.preparation, self.normalization)
                self.journal = Journal(self.folder, self.step, total, verbosity, started, self.lines, scene)
                stack.enter_context(contextlib.closing(self.journal))
                left, again = total - self.step, self.stepper.looks_first
                self.journal.say(expected_time(self._measured_seconds(), again, self.lines, left))
                self.journal.say(self._nothing_to_do())
            training = stack.enter_context(contextlib.closing(self._dataset(self.preparation.training)))
            held_out = None
            if self.preparation.validation is not None:
                held_out = stack.enter_context(contextlib.closing(self._dataset(self.preparation.validation)))
            if self.offload is not None:
                stack.enter_context(self.offload)
            stopped = self._loop(training, held_out, flag)
            moved = moved_by_ranks(self.offload, self.recipe.store, self.mesh)
            if self.journal is not None:
                self.journal.say(moved.in_words if moved else "")
                if stopped:
                    why = f"stopped early after step {self.step}, by a signal or because the job's time ends"
                    self.journal.say(f"{why}; its checkpoint is written: run the command again to go on")
                self._say_what_was_written(self.journal)
        self.parallel.close()
        if self.journal is not None:
            seconds = self.seconds_before + time.perf_counter() - begun
            self._summarise(seconds, stopped, self.journal.last_validation, moved)
            self.journal.draw(now=True)
            self.journal.say(self._written())
        return EXIT_CODE if stopped else 0

    def _nothing_to_do(self) -> str:
        """Return the line on going on with a run that has ended before."""
        done = f"nothing to do: {self.step} steps, {counted(self.position.epoch, 'epoch')}, are done"
        if self.course.ends_at(self.position):
            return f"{done}; give train.epochs above {self.position.epoch} to go on, or another run.output"
        if self.best.gives_up(self.position):
            return f"{done}, and train.early_stop has ended the run; give a larger one to go on, or another run.output"
        return ""

    def _written(self) -> str:
        """Return the line on the places of the run's results."""
        page, best = self.folder / PAGE, self.best.record()
        files = [f"report {page}"] if page.is_file() else []
        files.append(f"checkpoint {self.checkpoints / name_of(self.step)}")
        if best is not None:
            files.append(f"best {self.checkpoints / name_of(best['step'])} ({best['score']} {best['value']:.4f})")
        return f"wrote {', '.join(files)}"

    def _say_what_was_written(self, journal: Journal) -> None:
        """Rasters that were not left alone: some values may be those of before, some those of after."""
        for note in rewritten_notes(self.beginning.sources, self.judged):
            journal.say(f"warning: {note}")
            self.about = replace(self.about, warnings=(*self.about.warnings, note))

    def _measured_seconds(self) -> float | None:
        """Of a step as planned, unless that rests on a machine's datasheet."""
        machine = self.preparation.question.machine
        known = machine is None or not machine.known or machine.measured
        return self.plan.seconds if known else None

    def _loop(self, training: Dataset, held_out: Dataset | None, flag: StopFlag) -> bool:
        """All steps from the position on; True where a signal ended them early."""
        recipe, cadence = self.recipe, self.recipe.cadence
        steps, ahead = itertools.tee(
            (position, step, self.passes.mode.share(step))
            for position, step in self.sampler.steps_from(self.position, cadence.epochs)
        )
        mine = (part for _, _, parts in ahead for _ in range(self.stepper.rounds(parts)) for part in parts)
        samples = read_ahead(self.passes, training, mine, recipe.threads, recipe.prefetch)
        self.network.train()
        if self.best.gives_up(self.position):
            steps = iter(())
        with contextlib.closing(samples):  # type: ignore[type-var]
            for position, step, parts in steps:
                if self.unverified is not None:
                    self._verify(self.unverified, training, parts)
                    self.unverified = None
                result = self._one_step(training, samples, parts, flag, self._weight(step))
                self.position = self.course.after(position)
                if self.journal is not None:
                    rate = learning_rate(recipe.rate, self.step - 1, self.course)
                    self.journal.step(step_line(self.step, position.epoch, len(step), rate, result))
                epoch_ends = self.position.epoch > position.epoch
                better = False
                if epoch_ends and (position.epoch + 1) % cadence.validate_every == 0 and held_out is not None:
                    better = self._validate(held_out, position.epoch)
                last = self.course.ends_at(self.position) or self.best.gives_up(self.position)
                if last or better or result.stop or self.step % cadence.checkpoint_every == 0:
                    self._checkpoint()
                if last:
                    break
                if result.stop:
                    self.saver.wait()
                    return True
        if self.saved_in != self.checkpoints.resolve():
            self._checkpoint()  # nothing was left to do after a checkpoint in another folder
        self.saver.wait()
        return False

    def _one_step(
        self, training: Dataset, samples: Iterator[Sample], parts: Sequence[Part], flag: StopFlag, weight: float
    ) -> StepResult:
        self.saver.check()
        set_learning_rate(self.optimizer, learning_rate(self.recipe.rate, self.step, self.course))
        with doing("step %d", self.step + 1):
            try:
                result = self.stepper.run(self.step, samples, parts, flag.is_set, weight)
            except DivergedError as error:
                raise named(error, self.stepper.culprits(self.step, training, parts)) from None
        agree_on_buffers(self.network, self.parallel.axes.weights, self.passes.mode.speaks(parts))
        self.step += 1
        self.saved_in = None
        if self.offload is not None:
            self.offload.end_step()
        if self.average is not None and not result.skipped:
            self.average.update(self.step)
        return result

    def _weight(self, step: DrawnStep) -> float:
        """Bound of the weight of a step's pixels, on all ranks."""
        tilings = self.plan.tilings
        tiles = (one.tile if isinstance(one.tile, Tile) else tilings[one.image].tiles[one.tile] for one in step)
        return sum(tile.core.area for tile in tiles) * max((1.0, *self.preparation.class_weights))

    def _say(self, line: str) -> None:
        if self.journal is not None:
            self.journal.say(line)

    def _verify(self, network: GraphNetwork, training: Dataset, parts: Sequence[Part]) -> None:
        """Compare a traced network with its module on the root's first part, backward too. Collective."""
        from tiledseg.tracing.agreement import verify_first

        def load() -> torch.Tensor | None:
            part = next(iter(parts), None)
            return part and network_input(training.load(part.image, part.tile, draw=part.draw), self.mesh.device)

        with doing("comparing the network with what was traced of it"):
            most = self.preparation.question.memory
            verify_first(network.train(), load, self.mesh, self.recipe.precision, most, self._say)

    def _validate(self, held_out: Dataset, epoch: int) -> bool:
        """Whether the run has not been as good before: the same on all ranks, as the scores are."""
        from tiledseg.training.validation import validate

        label_map = self.preparation.label_map
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            found = validate(
                self.network,
                held_out,
                self.mesh,
                self.parallel.over(held_out.tilings, spread=self.plan.validation),
                label_map.count,
                label_map.ignore_index,
                self.recipe.threads,
                self.recipe.prefetch,
                self.panels,
                unseen if self.journal is None else self.journal.part,
            )
        if self.journal is not None:
            self.journal.validation(self.step, epoch, found)
        return self.best.takes(found, self.step, epoch)

    def _checkpoint(self) -> None:
        axes = self.parallel.axes
        check_finite(self.network, self.optimizer, self.mesh, self.step)
        check_agreement(self.network, self.mesh, axes.weights)
        self.saved_in = self.checkpoints.resolve()
        if self.mesh.rank >= axes.shape.stages and not self.mesh.is_root:
            return
        written = self.saver.save(self.network, self.optimizer, self.average, self._state(), self.best.step)
        if written and self.journal is not None:
            self.journal.draw()

    def _state(self) -> dict[str, Any]:
        """The JSON part of a checkpoint. Random draws are counted: seed and step are all their state."""
        return {
            "config": self.recipe.record,
            "network": described(self.plan.network),
            "normalization": asdict(self.normalization),
            "class_weights": list(self.preparation.class_weights),
            "best": self.best.record(),
            "found": self.preparation.found and asdict(self.preparation.found),
            "position": self.position._asdict(),
            "marks": self.course.marks,
            "sources": [asdict(source) for source in self.beginning.sources],
            "judged": [asdict(source) for source in self.judged],
            "resumed": [asdict(resumed) for resumed in self.beginning.resumed],
            "pretrained": self.beginning.pretrained and asdict(self.beginning.pretrained),
            "sampling": sampling_fingerprint(self.preparation),
            "random": {"seed": self.recipe.seed, "step": self.step},
            "step": self.step,
            "loss_scale": self.stepper.scale and asdict(self.stepper.scale),
        }

    def _resume(self, checkpoint: Checkpoint) -> None:
        load_optimizer(checkpoint, self.optimizer, self.mesh)
        saved = checkpoint.saved
        self.step, self.saved_in = saved.step, checkpoint.path.parent.resolve()
        self.position = saved.next_position
        course = self.course
        self.course = Course.onward(course.epochs, course.steps_per_epoch, saved.marks, self.step, self.position)

    def _loss_scale(self) -> LossScale | None:
        checkpoint = self.beginning.checkpoint
        if self.recipe.precision != "fp16":
            return None
        return (checkpoint and checkpoint.saved.loss_scale) or LossScale()

    def _dataset(self, rasters: RasterSet) -> Dataset:
        numbers = range(len(rasters.images))
        return Dataset(
            [rasters.open_image(number) for number in numbers],
            [rasters.open_labels(number) for number in numbers],
            rasters.tilings,
            self.preparation.label_map,
            self.normalization,
            INPUT_DTYPES[self.recipe.precision],
            self.preparation.objective.margin,
        )

    def _panels(self) -> Panels:
        """The places of the validation images that are shown, the same for every validation of the run."""
        held_out, ignored = self.preparation.validation, self.preparation.label_map.ignore_index
        shapes = [tiling.raster for tiling in held_out.tilings] if held_out else []
        return Panels(choose_views(shapes, self.recipe.panels, self.recipe.seed) if shapes else (), ignored)

    def _started(self) -> dict[str, Any]:
        """The facts of the summary that are known from the start."""
        return {**facts_of(self.preparation, self.folder.name, self.mesh), **self.about.to_json(self.mesh)}

    def _summarise(self, seconds: float, stopped: bool, validation: dict[str, Any] | None, moved: Moved | None) -> None:
        summary = {
            **self._started(),
            "offloaded": moved and moved._asdict(),
            "steps": self.step,
            "epochs": self.position.epoch,
            "finished": not stopped,
            "checkpoint_copy_bytes": self.copy.bytes if self.copy.fits else None,
            "resumed": [asdict(resumed) for resumed in self.beginning.resumed],
            "pretrained": self.beginning.pretrained and asdict(self.beginning.pretrained),
            "best": self.best.record(),
            "stopped_early": self.best.gives_up(self.position),
            "seconds": seconds,
            "val": validation,
        }
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
