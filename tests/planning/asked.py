"""The question of `tiledseg plan`, as its flags ask it."""

from __future__ import annotations

from typing import Any

from tiledseg.architecture.network import Network
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.units import MOST_BYTES


def asked_of(
    size: tuple[int, int], network: Network, grid: tuple[int, int] | None = None, memory: int = MOST_BYTES, **given: Any
) -> RunQuestion:
    """Return the question on one raster of that size."""
    parallel, ranks = Parallelism(mesh=given.pop("mesh", None)), given.pop("gpus", 0)
    given = {"machine": Machine(), "images_per_step": 0} | given
    return RunQuestion(network, (Extent(size),), ranks, memory, parallel, grid=grid, **given)
