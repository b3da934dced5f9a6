"""A few training steps, over all tiles of all images each."""

from __future__ import annotations

from tiledseg.execution.passes.part_passes import Passes
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.steps.step import Stepper


def losses_of_steps(stepper: Stepper, passes: Passes, data: Dataset, steps: int) -> list[float | None]:
    """The losses of this rank's lines; the stepper is closed after them."""
    tiles = [TileReference(i, t) for i in range(len(data.tilings)) for t in range(len(data.tilings[i]))]
    parts = passes.mode.share(tiles)
    losses = []
    for step in range(steps):
        samples = (data.load(part.image, part.tile) for part in parts if passes.loads)
        losses.append(stepper.run(step, samples, parts, stop=False).loss)
    stepper.close()
    return losses
