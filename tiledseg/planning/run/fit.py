"""How a step fits the memory of a rank: tiles at once, blocks, and what is rebuilt or leaves until it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.modes.mode_cost import Task
from tiledseg.planning.run.batch import BatchCase, bytes_of_tile, choose_batch
from tiledseg.planning.run.cost import memory_note
from tiledseg.planning.run.grids.grid import choose_grid
from tiledseg.planning.run.memory.blocks import BlockPlan, choose_blocks
from tiledseg.planning.run.memory.budget import Needed, check_budget, choose_memory, memory_choices
from tiledseg.planning.run.memory.offloading import OffloadPlan, offload_by, plan_offload
from tiledseg.planning.run.norms import exact_modes
from tiledseg.planning.run.pipeline import MicroBatchSize
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Spread, goes_together
from tiledseg.planning.walk.step_memory import fixed_memory
from tiledseg.records import dataclass

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice


@dataclass(frozen=True)
class Fit:
    """`memory`: bytes of a step of so many `tiles` at once. `blocks`, `rebuilt`, `offloaded`: see `RunPlan`."""

    tiles: int
    memory: int
    blocks: BlockPlan | None = None
    rebuilt: MemoryChoice | None = None
    offloaded: OffloadPlan | None = None


@dataclass(frozen=True)
class Fitting:
    """What is asked of the steps on `cut`, spread over the ranks; `tilings`: of these and of what is held out with
    them. `task`: the step that needs most, `largest` its micro-batches, `in_step` tiles of it; `batch`: images that go
    through the network together."""

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
        """Where all is kept a training step needs `needed` bytes, and with the validation `most`. Raises ConfigError
        for what cannot be, BudgetError where a budget that is asked for fits nothing."""
        blocks = self._blocks()
        if blocks is not None:
            if self.question.budgeted:
                blocks.check_budget(self.question.memory)
            return Fit(1, blocks.memory, blocks)
        tiles = 1 if self.spread.together else self._tiles_asked()
        at_once = self.batch if self.spread.together else tiles
        offloaded = self._offloaded(needed, tiles)
        if offloaded is not None:
            return Fit(at_once, offloaded.memory, offloaded=offloaded.of_batch(at_once))
        rebuilt = self._rebuilt(needed, tiles) if self.question.trains else None
        if rebuilt is not None:
            offloaded = offload_by(rebuilt)
            return Fit(at_once, rebuilt.peak, None, rebuilt, offloaded and offloaded.of_batch(at_once))
        return Fit(at_once, most) if self.spread.together else Fit(*self._batch(most))

    def note(self, found: Fit) -> str | None:
        """What the user should know where a rank has less memory than a step needs."""
        question = self.question
        if found.blocks is not None:
            return found.blocks.note(question.memory)
        told = question.trains and question.parallel.stages == 1
        return memory_note(self.spread, found.memory, question.memory, question.windows is not None) if told else None

    def _blocks(self) -> BlockPlan | None:
        """Raises ConfigError where tiles cannot be computed in blocks, or are to run several at once."""
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

    def _tiles_asked(self) -> int:
        """Tiles that are to run at once; 1 where nobody has said it, or nothing is trained."""
        asked = self.question.tiles_per_batch
        if not self.question.trains or asked in (None, 1):
            return 1
        case = BatchCase(asked, self.in_step, 1, 0, 0, False)
        return choose_batch(case, self.graph, self.spread, self.largest.pixels, lambda: 1)

    def _batch(self, step: int) -> tuple[int, int]:
        """Tiles that run at once, and the bytes of a step with so many; `step`: those of one."""
        question = self.question
        if not question.trains:
            return 1, step
        own = self.largest.count if self.spread.shares_images else -(-self.in_step // question.ranks)
        wide = question.precision == "fp64"
        paying = question.batch_pixels if wide else 0
        case = BatchCase(question.tiles_per_batch, self.in_step, own, paying, question.memory - step, wide)
        batch = choose_batch(case, self.graph, self.spread, self.largest.pixels, self._further)
        return batch, step if batch == 1 else step + (batch - 1) * self._further()

    def _further(self) -> int:
        """Bytes that each tile of a batch takes."""
        return bytes_of_tile(self.graph, self.task.bands, self.largest.pixels, self.task.value_bytes)

    def _offloaded(self, needed: int, tiles: int) -> OffloadPlan | None:
        """What stays in memory of a step that needs so many bytes a tile with everything kept; None where all does."""
        question = self.question
        if not question.offload:
            return None
        budget = question.memory if question.budgeted else None
        return plan_offload(self.spread, self.graph, self.task.bands, self.largest, needed, budget, tiles)

    def _rebuilt(self, needed: int, tiles: int) -> MemoryChoice | None:
        """What is computed once more so that a step of so many `tiles` at once fits, of which one needs `needed` bytes;
        None where the user has said it."""
        question, spread, task = self.question, self.spread, self.task
        if spread.mesh.stages > 1:
            if question.store is not None:
                raise ConfigError(
                    f"memory.offload is auto, but parallel.stages is {spread.mesh.stages}, where nothing but what is "
                    "computed once more is chosen; leave offload out, or give all"
                )
            return None  # as each stage needs it: see `balanced`
        needed += (tiles - 1) * self._further() if tiles > 1 else 0
        if question.recompute != "auto":
            if question.budgeted:
                check_budget(question.recompute, needed, question.memory)
            return None
        fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
        sizes = Needed(needed, fixed, task.images if spread.together else tiles)
        steps = partial(memory_choices, spread, task, self.cut, question.store)
        finer = partial(self._finer, fixed + (question.memory - fixed) // tiles)
        return choose_memory(spread, steps, sizes, question.memory, question.budgeted, finer)

    def _finer(self, room: int) -> tuple[int, int] | None:
        """The coarsest grid of the largest raster whose tiles fit so many bytes with everything kept; None where tiles
        are not what a rank computes alone, or none fits."""
        question, task = self.question, self.task
        whole = question.parallel.exact and self.spread.mode not in exact_modes(task.graph, tiles=2)
        if self.spread.shares_images or question.windows or whole:
            return None
        largest = max(self.cut, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
        try:
            return choose_grid(largest.raster, task.graph, largest.footprint, room, task.value_bytes, 1, task.bands)
        except GeometryError:
            return None


def images_at_once(question: RunQuestion, graph: Graph) -> int:
    """Of a step whose images go through the network together; 1 where they do not."""
    images = question.images_per_step
    if not question.trains or not goes_together(question.parallel, graph, images):
        return 1
    return min(question.tiles_per_batch or 1, images)
