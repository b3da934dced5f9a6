"""Fitting a step to the memory of a rank: tiles at once, blocks, tensors that are recomputed or offloaded.

A batch saves what every call of a kernel costs besides its pixels, and holds the activations of all its tiles. Below
float64 a kernel rounds the sums of a batch otherwise: a batch is what the user sets, of tiles that follow from the step
alone, never what ranks, memory or a device would make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.modes.mode_cost import Task
from tiledseg.planning.run.blocks import BlockPlan, choose_blocks
from tiledseg.planning.run.grids.grid import choose_grid
from tiledseg.planning.run.memory import (
    OffloadPlan,
    check_budget,
    choose_memory,
    memory_choices,
    offload_by,
    plan_offload,
)
from tiledseg.planning.run.norms import exact_modes, of_steps
from tiledseg.planning.run.pipeline import MicroBatchSize
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Spread, goes_together
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice


@dataclass(frozen=True)
class Fit:
    """`memory`: bytes of a step of `tiles` at once. `blocks`, `rebuilt`, `offloaded`: see `RunPlan`."""

    tiles: int
    memory: int
    blocks: BlockPlan | None = None
    rebuilt: MemoryChoice | None = None
    offloaded: OffloadPlan | None = None


@dataclass(frozen=True)
class Fitting:
    """The steps on `cut`, spread over the ranks; `tilings`: of these and of the rasters held out with them. `task`: the
    step that needs most, `largest` its micro-batches, `in_step` its tiles; `batch`: images that go through the network
    together."""

    question: RunQuestion
    spread: Spread
    task: Task
    cut: Sequence[Tiling]
    tilings: Sequence[Tiling]
    largest: MicroBatchSize
    in_step: int
    batch: int

    @property
    def graph(self) -> Graph:
        return self.task.graph

    def fit(self, needed: int, most: int) -> Fit:
        """Fit a training step of `needed` bytes, with the validation `most`, into the memory of a rank. Raises
        ConfigError for settings that exclude each other, BudgetError where a budget of the user fits nothing."""
        blocks = self._blocks()
        if blocks is not None:
            if self.question.budgeted:
                blocks.check_budget(self.question.memory)
            return Fit(1, blocks.memory, blocks)
        together = self.spread.together
        tiles = 1 if together or not self.question.trains else self._tiles()
        at_once = self.batch if together else tiles
        offloaded = self._offloaded(needed, tiles)
        if offloaded is not None:
            return Fit(at_once, offloaded.memory, offloaded=offloaded.of_batch(at_once))
        rebuilt = self._rebuilt(needed, tiles) if self.question.trains else None
        if rebuilt is not None:
            offloaded = offload_by(rebuilt)
            return Fit(at_once, rebuilt.peak, None, rebuilt, offloaded and offloaded.of_batch(at_once))
        return Fit(at_once, most + self._further(tiles))

    def note(self, fit: Fit) -> str | None:
        """Return a warning where a rank has less memory than a step needs."""
        question = self.question
        if fit.blocks is not None:
            return fit.blocks.note(question.memory)
        if not question.trains or question.parallel.stages > 1 or fit.memory <= question.memory:
            return None
        sizes = f"needs about {fit.memory / 2**30:.1f} GiB, but {question.memory / 2**30:.1f} GiB are to be had"
        if question.windows is not None:
            together = self.spread.together
            held = "all windows of a step are held at once" if together else "a step on the largest window or tile"
            fewer = "fewer train.windows_per_step, or " if together else ""
            remedy = f"{fewer}a smaller train.window, and for the validation a finer tiling.grid"
            return f"{held}, which {sizes}; use {remedy}"
        if self.spread.shares_layers:
            return (
                f"parallel.halo layer computes the whole block of a rank at once, which {sizes}; use more ranks an "
                "image, or mode exchange or read with a finer tiling.grid"
            )
        return f"a training step on the largest tile {sizes}; use a finer tiling.grid"

    def _blocks(self) -> BlockPlan | None:
        """Return the blocks of a tile, if any. Raises ConfigError for settings that blocks exclude."""
        question = self.question
        if question.blocks is None:
            return None
        if question.tiles_per_batch not in (None, 1):
            raise ConfigError(
                f"train.tiles_per_batch is {question.tiles_per_batch}, but with memory.blocks one tile alone is too "
                "much at once; leave it out"
            )
        asked = self.task.bands, self.tilings, question.value_bytes, question.memory, question.trains
        return choose_blocks(question.blocks, self.spread, self.graph, *asked, self._together)

    @property
    def _together(self) -> int | None:
        """Images of a rank that go through the network together, None where each goes alone. Tiles are dealt out by
        their size: no rank has more pixels than so many of the largest."""
        if not self.spread.together:
            return None
        return self.task.images if self.spread.shares_images else -(-self.in_step // self.question.ranks)

    def _tiles(self) -> int:
        """Return the tiles that run at once. Raises ConfigError where several are set and cannot."""
        tiles = self.question.tiles_per_batch
        if tiles in (None, 1):
            return 1
        alone = why_alone(self.graph, self.spread, self.question.precision == "fp64")
        if alone is not None:
            raise ConfigError(f"train.tiles_per_batch is {tiles}, but {alone}; or leave it out")
        return min(tiles, self.in_step)

    def _further(self, tiles: int) -> int:
        """Return the bytes of all tiles of a batch but one."""
        if tiles == 1:
            return 0
        tile = training_memory(self.graph, self.task.bands, self.largest.pixels, self.task.value_bytes)
        return (tiles - 1) * (tile.activations + tile.backward)

    def _offloaded(self, needed: int, tiles: int) -> OffloadPlan | None:
        """Return the plan of a step that offloads everything; None where the user has not set that."""
        question = self.question
        if not question.offload:
            return None
        budget = question.memory if question.budgeted else None
        return plan_offload(self.spread, self.graph, self.task.bands, self.largest, needed, budget, tiles)

    def _rebuilt(self, needed: int, tiles: int) -> MemoryChoice | None:
        """Choose what is recomputed so that a step of `tiles` at once fits, of which one needs `needed` bytes; None
        where everything fits, or the user has set what is recomputed."""
        question, spread, task = self.question, self.spread, self.task
        if spread.mesh.stages > 1:
            if question.store is not None:
                raise ConfigError(
                    f"memory.offload is auto, but parallel.stages is {spread.mesh.stages}, where nothing but what is "
                    "computed once more is chosen; leave offload out, or give all"
                )
            return None  # as each stage needs it: see `balanced`
        needed += self._further(tiles)
        if question.recompute != "auto" and question.budgeted:
            check_budget(question.recompute, needed, question.memory)
        if question.recompute != "auto" or needed <= question.memory:
            return None
        fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
        every = memory_choices(spread, task, self.cut, question.store)
        images, budget = task.images if spread.together else tiles, question.memory

        def finer() -> tuple[int, int] | None:
            return self._finer(fixed + (budget - fixed) // tiles)

        return choose_memory(spread, every, needed, fixed, images, budget, question.budgeted, finer)

    def _finer(self, room: int) -> tuple[int, int] | None:
        """Return the coarsest grid of the largest raster whose tiles fit `room` bytes with everything kept; None where
        a rank does not compute tiles alone, or none fits."""
        question, task = self.question, self.task
        whole = question.parallel.exact and self.spread.mode not in exact_modes(task.graph, tiles=2)
        if self.spread.shares_images or question.windows or whole:
            return None
        largest = max(self.cut, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
        try:
            return choose_grid(largest.raster, task.graph, largest.footprint, room, task.value_bytes, 1, task.bands)
        except GeometryError:
            return None


def why_alone(graph: Graph, spread: Spread, wide: bool) -> str | None:
    """Return why no tile can run with another, and the remedy; None where tiles can. `wide`: in float64."""
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


def images_at_once(question: RunQuestion, graph: Graph) -> int:
    """Return the images that go through the network together at once; 1 where each goes alone."""
    images = question.images_per_step
    if not question.trains or not goes_together(question.parallel, graph, images):
        return 1
    return min(question.tiles_per_batch or 1, images)
