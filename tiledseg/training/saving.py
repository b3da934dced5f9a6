"""A run's checkpoints: copied where the run stands, and written, digested and named while it goes on.

At most one is under way; the next save waits for it, and so does the end of the run, whatever ends it. An error of the
writing is raised at the next step or save, on the rank that writes. If the run ends for another reason meanwhile, the
error is raised in its place, for it came first. Where a rank's memory does not hold a copy beside its step, training
waits while each is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiledseg.checkpoint.background import Background, Snapshot
from tiledseg.checkpoint.folder import Contents, contents_of, save_checkpoint, unfinished_bytes
from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.watching.doing import doing, tick
from tiledseg.execution.memory import host_memory
from tiledseg.geometry.shapes import count_parameters
from tiledseg.planning.walk.step_memory import ADAM_VALUES
from tiledseg.training.averaging import AveragedWeights
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.units.widths import ACTIVATION_BYTES, wide_bytes

_MIB = 2**20
_LOOK_SECONDS = 1.0


class CopyPlan(NamedTuple):
    """The bytes of a copy of the run's state, and the room for it beside a step."""

    bytes: int
    room: int

    @property
    def fits(self) -> bool:
        return self.bytes <= self.room

    @property
    def note(self) -> str | None:
        """The warning of a copy that does not fit; else None."""
        if self.fits:
            return None
        return (
            f"training waits while a checkpoint is written: a copy of it takes {self.bytes / _MIB:.1f} MiB, and beside "
            f"a step {max(0, self.room) / _MIB:.1f} MiB are available"
        )


def copy_plan(preparation: Preparation, device: torch.device) -> CopyPlan:
    """Count weights, their average and the optimizer's values, on the rank that writes; a GPU's go to its host."""
    train, optimizer, plan = preparation.config.train, preparation.config.optimizer, preparation.plan
    values = ADAM_VALUES if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    parameters = count_parameters(plan.network.graph(), plan.network.bands)
    needed = parameters * (1 + values + (train.ema > 0)) * wide_bytes(ACTIVATION_BYTES[train.precision])
    return CopyPlan(needed, preparation.question.memory - plan.memory if device.type == "cpu" else host_memory())


class Saver:
    """A writer of the checkpoints of one run into `folder`, of which it keeps `keep` and the best. `copies`: in the
    background. Every rank has one; the root's writes."""

    def __init__(self, folder: Path, keep: int, axes: Axes, copies: bool) -> None:
        self._folder, self._keep, self._axes = folder, keep, axes
        self._snapshot = Snapshot() if copies else None
        self._background = Background("checkpoint")

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
        contents = collect(self._contents(network, optimizer, average), self._axes)
        if contents is None:
            return False
        folder, keep, step = self._folder, self._keep, state["step"]

        self._background.begin(lambda: save_checkpoint(folder, step, contents, state, keep, best))
        if self._snapshot is None:
            self.wait()
        return True

    def _contents(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedWeights | None
    ) -> Contents:
        """Return this rank's part: a copy if it is written while training goes on. Other stages send theirs at once."""
        tensors = average.tensors if average is not None else None
        sends = self._axes.position is not None and self._axes.position.stage > 0
        if self._snapshot is None or sends:
            return contents_of(network, optimizer, tensors)
        contents = contents_of(network, optimizer, tensors, self._snapshot.copy)
        self._snapshot.finish()
        return contents

    def check(self) -> None:
        """Raise the error that has stopped the last checkpoint; do not wait."""
        self._background.check()

    def wait(self) -> None:
        """Wait until the last checkpoint has its name: it makes progress as long as its files grow."""
        if self._background.is_busy(0.0):
            with doing("writing a checkpoint"):
                self._grow()
        self._background.wait()

    def _grow(self) -> None:
        written = -1
        while self._background.is_busy(_LOOK_SECONDS):
            now = unfinished_bytes(self._folder)
            if now != written:
                tick()
            written = now


def collect(own: Contents, axes: Axes) -> Contents | None:
    """Return the contents of all stages on the rank of stage 0; None on the others. Collective over a pipeline.

    It cannot deadlock: stage 0 receives tensor by tensor in the order of stages and names, which all know beforehand,
    and each other stage does nothing but send its own in that order.
    """
    if axes.shape.stages == 1 or axes.position is None:
        return own
    named = {("weights", name): tensor for name, tensor in own.weights.items()}
    named |= {("state", name): tensor for name, tensor in own.optimizer.items()}
    named |= {("average", name): tensor for name, tensor in own.average.items()}
    kinds = axes.pipeline.gather_objects([(key, tensor.shape, tensor.dtype) for key, tensor in named.items()])
    if axes.position.stage > 0:
        for tensor in named.values():
            axes.stage_messages.start([Message(axes.rank_of_stage(0), tensor)], []).wait()
        return None
    for stage, theirs in enumerate(kinds[1:], start=1):
        for key, shape, dtype in theirs:
            named[key] = torch.empty(shape, dtype=dtype)
            axes.stage_messages.start([], [Message(axes.rank_of_stage(stage), named[key])]).wait()
    weights, state, average = (
        {name: tensor for (kind, name), tensor in named.items() if kind == wanted}
        for wanted in ("weights", "state", "average")
    )
    return Contents(weights, state, own.groups, average)
