"""A run's checkpoints: copied where the run stands, and written, digested and named while it goes on.

At most one is under way; the next save waits for it, and so does the end of the run, whatever ends it. An error of the
writing is raised at the next step or save, on the rank that writes. If the run ends for another reason meanwhile, the
error is raised in its place, for it came first.

A thread writes, not a process: safetensors, the digests and the system's calls release the interpreter lock while they
work, a process would import torch and hold the tensors once more.

Here too: the end of a run before its last step, by a signal or as the job's time ends, between steps and with a
checkpoint; and the best validation by a named score, whose checkpoint is kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiledseg.checkpoint.folder import Contents, contents_of, save_checkpoint, unfinished_bytes
from tiledseg.checkpoint.saved_state import Best
from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Axes
from tiledseg.comm.point_to_point import Message
from tiledseg.config.train import TrainConfig
from tiledseg.config.words import LOSS, class_of
from tiledseg.errors import ConfigError
from tiledseg.memory.device import api, is_gpu
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.sampling import Position
from tiledseg.system.signals import STOPPED, is_met
from tiledseg.training.optimizer import AveragedWeights

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings

_LOOK_SECONDS = 1.0


class Saver:
    """A writer of a run's checkpoints into `folder`, of which it keeps `keep` and the best; the root's writes."""

    def __init__(self, folder: Path, keep: int, axes: Axes) -> None:
        self._folder, self._keep, self._axes = folder, keep, axes
        self._copies: dict[str, torch.Tensor] = {}  # taken anew at each save: fresh memory would cost more time
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: AveragedWeights | None,
        state: Mapping[str, Any],
        best: int | None,
    ) -> bool:
        """Begin the checkpoint of `state["step"]`; return True if this rank writes it. Collective over a pipeline;
        other replicas need not call it. Raises the error of the checkpoint before."""
        self.wait()
        tensors = average.tensors if average is not None else None
        if self._axes.position is not None and self._axes.position.stage > 0:
            own = contents_of(network, optimizer, tensors)  # other stages send theirs at once
        else:
            own = contents_of(network, optimizer, tensors, self._copy)
            for device in {parameter.device for parameter in network.parameters() if is_gpu(parameter.device)}:
                api(device).synchronize(device)  # then all copies are whole, and the tensors may change
        contents = collect(own, self._axes)
        if contents is None:
            return False
        # A daemon: a process that must end at once does; what was begun has no name yet.
        self._thread = threading.Thread(
            target=self._write, args=(contents, state, best), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def check(self) -> None:
        """Raise the error that has stopped the last checkpoint, once; do not wait."""
        if not self._is_busy(0.0):
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint has its name, as long as its files grow; raise what has stopped it, once."""
        if self._is_busy(0.0):
            with doing("writing a checkpoint"):
                written = -1
                while self._is_busy(_LOOK_SECONDS):
                    if (now := unfinished_bytes(self._folder)) != written:
                        tick()
                    written = now
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor` on the CPU; that of a GPU's is in pinned memory, and on its way."""
        source, held = tensor.detach(), self._copies.get(name)
        if held is None or held.shape != source.shape or held.dtype != source.dtype:
            held = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_gpu(source.device))
            self._copies[name] = held
        return held.copy_(source, non_blocking=True)

    def _is_busy(self, seconds: float) -> bool:
        """Wait at most `seconds`; return True if a checkpoint is still being written."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def _write(self, contents: Contents, state: Mapping[str, Any], best: int | None) -> None:
        try:
            save_checkpoint(self._folder, state["step"], contents, state, self._keep, best)
        except BaseException as error:
            self._error = error


def collect(own: Contents, axes: Axes) -> Contents | None:
    """Return the contents of all stages on the rank of stage 0; None on the others. Collective over a pipeline.

    It cannot deadlock: stage 0 receives tensor by tensor in the order of stages and names, which all know beforehand,
    and each other stage does nothing but send its own in that order.
    """
    if axes.shape.stages == 1 or axes.position is None:
        return own
    parts = {"weights": own.weights, "state": own.optimizer, "average": own.average}
    named = {(kind, name): tensor for kind, tensors in parts.items() for name, tensor in tensors.items()}
    kinds = axes.pipeline.gather_objects([(key, tensor.shape, tensor.dtype) for key, tensor in named.items()])
    if axes.position.stage > 0:
        for tensor in named.values():
            axes.stage_messages.start([Message(axes.rank_of_stage(0), tensor)], []).wait()
        return None
    for stage, theirs in enumerate(kinds[1:], start=1):
        for key, shape, dtype in theirs:
            named[key] = torch.empty(shape, dtype=dtype)
            axes.stage_messages.start([], [Message(axes.rank_of_stage(stage), named[key])]).wait()
    weights, state, average = ({n: tensor for (k, n), tensor in named.items() if k == kind} for kind in parts)
    return Contents(weights, state, own.groups, average)


EXIT_CODE = STOPPED

# When the job ends, as Unix seconds: what the batch scripts of `jobs/` say, and what newer Slurm says by itself.
_END_TIMES = ("TILEDSEG_END_TIME", "SLURM_JOB_END_TIME")
_SPARE = 30.0  # seconds for the last checkpoint's way to the disk and the end of all processes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the end of the job's time in Unix seconds; None if it is not set. Raises ConfigError for no number."""
    for name in _END_TIMES:
        if said := environ.get(name):
            if said.isdecimal():
                return float(said)
            raise ConfigError(f"{name} is '{said}'; give Unix seconds, as date +%s prints them, or unset it")
    return None


class StopFlag:
    """A flag that the signals of `system.signals` set, where they are deferred; no handler does more. So does the job's
    `end` (Unix seconds), once nearer than two of the longest steps so far, with checkpoint and validation.

    A run reads it at the beginning of each step. Ranks may see it at different steps: the reader adds up what all see.
    """

    def __init__(self, end: float | None = None) -> None:
        self.end, self._before, self._longest = end, time.time(), 0.0

    @property
    def is_set(self) -> bool:
        now = time.time()
        self._before, self._longest = now, max(self._longest, now - self._before)
        return is_met() or (self.end is not None and now + 2 * self._longest + _SPARE > self.end)


ROUNDING = 1e-9
"""A share of a loss, far above what sums in float64 differ by and below what anybody trains for."""


def score_class(score: str, label_map: LabelMap, validates: bool) -> int | None:
    """Return the class whose IoU `train.best` is; None if it is another score. Raises ConfigError for a score that no
    validation finds, or of a class that there is not."""
    if score != "none" and not validates:
        raise ConfigError(
            f"train.best is {score}, but nothing is validated on; give data.val_images, data.split, or a manifest with "
            "a column split"
        )
    name = class_of(score)
    if name is None:
        return None
    if name not in label_map.numbers:
        names = ", ".join(record.name for record in label_map.classes)
        raise ConfigError(f"train.best is {score}, but no class is '{name}'; give one of {names}, or its number")
    return label_map.numbers[name]


class BestSoFar:
    """The best validation of a run by `train.best`; `number`: of the class that it names; `best`: so far."""

    def __init__(self, train: TrainConfig, number: int | None, best: Best | None) -> None:
        self._train, self._number, self.best = train, number, best

    def takes(self, findings: Findings, step: int, epoch: int) -> bool:
        """Return True if a validation is better than the best so far, and keep it as the best."""
        score = self._train.best
        value = None if score == "none" else self._value(findings, score)
        if value is None:
            return False
        if self.best is not None:  # a loss is better by more than the order of its sum may change, on any ranks alike
            limit = self.best.value - ROUNDING * abs(self.best.value)
            if value >= limit if score == LOSS else value <= self.best.value:
                return False
        self.best = Best(score, value, step, epoch)
        return True

    def gives_up(self, position: Position) -> bool:
        """Return True at an epoch's end if the best validation is `train.early_stop` epochs ago."""
        patience, epoch = self._train.early_stop, position.epoch - 1
        if patience is None or self.best is None or position.step or position.epoch % self._train.validate_every:
            return False
        return epoch - self.best.epoch >= patience

    def _value(self, findings: Findings, score: str) -> float | None:
        """Return the score; None if it has no meaning."""
        from tiledseg.execution.scores import scores

        if score == LOSS:
            return findings.loss
        of_matrix = scores(findings.matrix_KK)
        value = float(of_matrix.iou[self._number] if self._number is not None else getattr(of_matrix, score))
        return None if math.isnan(value) else value
