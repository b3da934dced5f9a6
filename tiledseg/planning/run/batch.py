"""How many tiles of one shape run at once while training: as asked for, or as many as pay and fit.

A batch saves what every call of a kernel costs besides its pixels, and holds the activations of all its tiles. Each
tile has its own loss, its own dropout and its own statistics; what would not be so, or has no tiles that could run
together, is refused where it is asked for, and else left at one.

A kernel sums the gradients of a batch in its own precision. In float64 that is equal to 1e-12, whoever has which tiles.
In float32 and less it is another rounding: a batch is what is asked for, of tiles that follow from the step alone, not
what ranks, memory or a device would make it.
"""

from __future__ import annotations

from collections.abc import Callable

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.planning.run.norms import of_steps
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.records import dataclass


@dataclass(frozen=True)
class BatchCase:
    """`asked`: None for auto. `in_step`: tiles of a step, `own` of them a rank's. `paying`: pixels of a batch, the most
    that are faster at once than tile by tile (0: none are). `left`: bytes that a rank has besides a step of one tile.
    `wide`: in float64."""

    asked: int | None
    in_step: int
    own: int
    paying: int
    left: int
    wide: bool


def choose_batch(
    case: BatchCase, graph: Graph, spread: Spread, pixels: tuple[int, int], further: Callable[[], int]
) -> int:
    """Tiles that run at once, the largest of `pixels` (height, width); `further`: the bytes that each but the first
    takes. Raises ConfigError where several are asked for that cannot."""
    alone = _why_alone(graph, spread, case.wide)
    if alone is not None:
        if case.asked not in (None, 1):
            raise ConfigError(f"train.tiles_per_batch is {case.asked}, but {alone}; or leave it out")
        return 1
    if case.asked is not None:
        return min(case.asked, case.in_step)
    paying = min(case.own, case.paying // (pixels[0] * pixels[1]))
    return 1 if paying <= 1 else max(1, min(paying, 1 + case.left // further()))


def bytes_of_tile(graph: Graph, bands: int, pixels: tuple[int, int], value: int) -> int:
    """That each tile of a batch takes for itself, of (height, width) `pixels`."""
    tile = training_memory(graph, bands, pixels, value)
    return tile.activations + tile.backward


def _why_alone(graph: Graph, spread: Spread, wide: bool) -> str | None:
    """Why no tile can run with another, and what to do; None where tiles can."""
    if spread.mesh.stages > 1:
        return "in stages each tile is a micro-batch by itself; use parallel.stages 1"
    if spread.shares_layers:
        return "in parallel.halo layer a rank has no tiles, but a block of an image; use parallel.halo read"
    if spread.shares_images and not wide:
        return (
            "in parallel.halo exchange a rank has the tiles of its block, so the number of ranks would round the "
            "gradients' sums; use parallel.halo read"
        )
    placed = [node.name for node in graph.nodes if node.layer.asks_place]
    if placed:
        return (
            f"'{placed[0]}' resizes with align_corners, and each tile has a place of its own; set align_corners=False"
        )
    measured = of_steps(graph)
    if measured:
        return (
            f"{measured[0].name} takes its statistics over a batch, which would be others; use model.freeze_norm, or "
            "another norm"
        )
    return None
