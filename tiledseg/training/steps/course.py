"""How the steps of a run lie in its epochs: where it ends, and how much of it is behind.

The end of a run is a position, the end of epoch `train.epochs`, not a number of steps: a resumed run may have other
steps in an epoch than before (more images, another global batch), and its steps are then counted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tiledseg.raster.samples.sampling import Position
from tiledseg.records import dataclass

Mark = tuple[int, int]


@dataclass(frozen=True)
class Course:
    """A run of `epochs` epochs with, now, `steps_per_epoch` steps in each.

    `marks` are (steps, epochs) that were done where the number of steps an epoch changed, the start (0, 0) first. A run
    that was never changed has that one alone.
    """

    epochs: int
    steps_per_epoch: int
    marks: tuple[Mark, ...] = ((0, 0),)

    @staticmethod
    def onward(epochs: int, steps_per_epoch: int, marks: Sequence[Mark], step: int, position: Position) -> Course:
        """The course of a run that stands at `position` after `step` steps; with a mark more where that does not
        follow from `marks` with as many steps an epoch as now."""
        begun = (step - position.step, position.epoch)  # of the epoch that goes on
        last_step, last_epoch = marks[-1]
        straight = begun == (last_step + (position.epoch - last_epoch) * steps_per_epoch, position.epoch)
        return Course(epochs, steps_per_epoch, tuple(marks) if straight else (*marks, begun))

    @property
    def total_steps(self) -> int:
        """The steps of the whole run: those done, and those left."""
        step, epoch = self.marks[-1]
        return step + max(0, self.epochs - epoch) * self.steps_per_epoch

    def ends_at(self, position: Position) -> bool:
        """Whether a run that stands there has nothing left to do."""
        return position.epoch >= self.epochs

    def epochs_after(self, steps: int) -> Fraction:
        """Epochs done after so many steps of the run, the begun one in part."""
        for (step, epoch), (next_step, next_epoch) in zip(self.marks, self.marks[1:], strict=False):
            if steps < next_step:
                return epoch + Fraction((steps - step) * (next_epoch - epoch), next_step - step)
        step, epoch = self.marks[-1]
        return epoch + Fraction(steps - step, self.steps_per_epoch)

    def share_after(self, steps: int, warmup_steps: int) -> float:
        """The share, 0 to 1, of the epochs after the warm-up that is done after so many steps."""
        warm = self.epochs_after(warmup_steps)
        if warm >= self.epochs:
            return 1.0
        # One division of whole numbers, rounded once: that of steps, where the run was never changed.
        return min(1.0, float((self.epochs_after(steps) - warm) / (self.epochs - warm)))
