"""Where a training step needs more memory than a rank has: what is rebuilt in its backward pass so that it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.modes.mode_cost import Task
from tiledseg.planning.run.spread import Spread
from tiledseg.records import dataclass

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice, StepChoices
    from tiledseg.planning.memory.store import Store

_TRIES = 4  # choices for the largest step, each with less room, where another one takes more


@dataclass(frozen=True)
class Needed:
    """Bytes of a step where everything is kept: `all`, of `images` that go through the network together, which share
    `fixed` ones; 1 where they do not."""

    all: int
    fixed: int
    images: int = 1

    def of_one(self, kept: int, budget: int) -> int:
        """What is left of a budget for an image, of which a step keeps so many."""
        others = self.all - self.images * (kept - self.fixed)
        return self.fixed + (budget - others) // self.images

    def of_all(self, kept: int, one: int) -> int:
        """Of a step of which each image takes so many."""
        return self.all - self.images * (kept - one)


def memory_choices(
    spread: Spread, task: Task, tilings: Sequence[Tiling], store: Store | None = None
) -> list[StepChoices]:
    """Of the steps on all contexts of `tilings`, tensors of which may leave for `store`; where ranks share layers,
    those of all kinds of ranks on the largest image."""
    from tiledseg.planning.memory.block_choice import block_choices
    from tiledseg.planning.memory.choice import step_choices

    if spread.shares_layers:
        return block_choices(task, spread.fusion, spread.overlap, store)
    contexts = {tiling.context_max for tiling in tilings}
    return [step_choices(task.graph, task.bands, context, task.value_bytes, store) for context in contexts]


def choose_memory(
    spread: Spread,
    steps: Callable[[], Sequence[StepChoices]],
    needed: Needed,
    budget: int,
    asked: bool,
    finer: Callable[[], tuple[int, int] | None],
) -> MemoryChoice | None:
    """What is rebuilt in `steps`, those of all contexts, or of all kinds of ranks where they share layers: one choice
    for all. None where what is `needed` fits `budget`.

    Raises BudgetError, where the budget is `asked` for, if no choice fits it: it names a `finer` grid that does, where
    there is one.
    """
    if needed.all <= budget:
        return None
    every = steps()
    largest = max(every, key=lambda step: step.kept)
    room = needed.of_one(largest.kept, budget)
    found = _fitting(every, largest, room)
    if found is None:
        if asked:
            raise _too_small(spread, largest, needed, budget, finer())
        return None
    return replace(found, kept=needed.all, peak=needed.of_all(largest.kept, found.peak))


def _fitting(every: Sequence[StepChoices], largest: StepChoices, room: int) -> MemoryChoice | None:
    """The choice for the largest step that fits all others too; where one takes more by it, with less room."""
    left = room
    for _ in range(_TRIES):
        found = largest.choose(left)
        if found is None:
            return None
        peak = max(step.peak(found.policy) for step in every)
        if peak <= room:
            return replace(found, peak=peak)
        left -= peak - room
    return None


def check_budget(recompute: str, needed: int, budget: int) -> None:
    """Raise BudgetError where a step does not fit with what the user has said is computed once more."""
    if needed > budget:
        raise BudgetError(
            f"memory.budget is {budget} bytes, but with memory.recompute {recompute} a step needs {needed}; leave "
            "recompute out, or use a finer tiling.grid"
        )


def _too_small(
    spread: Spread, step: StepChoices, needed: Needed, budget: int, finer: tuple[int, int] | None
) -> BudgetError:
    least = needed.of_all(step.kept, step.least())
    what, use = "tile", "a smaller model, train.precision bf16, or parallel.halo layer on more ranks"
    if finer is not None:
        use = f"{in_words(finer)}{use}"
    elif spread.shares_images:
        use = f"a finer tiling.grid, {use}"
    if spread.shares_layers:
        what, use = "block of an image", "more ranks an image, memory.blocks, a smaller model, or train.precision bf16"
    if needed.images > 1:
        use = f"a smaller train.tiles_per_batch or train.images_per_step, {use}"
    error = BudgetError(
        f"memory.budget is {budget} bytes, but a training step on the largest {what} needs {needed.all}, and {least} "
        f"with all rebuilt that helps; use {use}"
    )
    error.least, error.finer = least, finer
    return error


def in_words(finer: tuple[int, int] | None) -> str:
    """The part of a message that proposes a grid."""
    return "" if finer is None else f"tiling.grid [{finer[0]},{finer[1]}], which fits with all kept, "
