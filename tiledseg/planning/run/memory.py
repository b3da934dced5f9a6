"""Where a training step needs more memory than a rank has: what is rebuilt in its backward pass so that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.spread import Spread

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice, StepChoices


def choose_memory(
    spread: Spread,
    graph: Graph,
    bands: int,
    value_bytes: int,
    tilings: Sequence[Tiling],
    needed: int,
    budget: int,
    asked: bool,
) -> MemoryChoice | None:
    """What is rebuilt in steps on the tiles of `tilings`, which need `needed` bytes where everything is kept. None
    where that fits `budget`, or where nothing is to be had by it: images whose layers are shared, and stages, keep all.

    Raises BudgetError, where the budget is `asked` for, if no choice fits it.
    """
    if needed <= budget:
        return None
    if spread.shares_layers or spread.mesh.stages > 1:
        if asked:
            raise BudgetError(
                f"memory.budget is {budget} bytes, but a step needs {needed}; with parallel.halo layer and with stages "
                "nothing is rebuilt by it yet: use more ranks, or parallel.halo read or exchange without stages"
            )
        return None
    from tiledseg.planning.memory.choice import step_choices

    contexts = {tiling.context_max for tiling in tilings}
    steps = [step_choices(graph, bands, context, value_bytes) for context in contexts]
    largest = max(steps, key=lambda step: step.kept)
    besides = needed - largest.kept  # blocks of mode exchange
    found = largest.choose(budget - besides)
    if found is None and asked:
        raise _too_small(largest, budget, besides)
    return found


def check_budget(recompute: str, needed: int, budget: int) -> None:
    """Raise BudgetError where a step does not fit with what the user has said is computed once more."""
    if needed > budget:
        raise BudgetError(
            f"memory.budget is {budget} bytes, but with memory.recompute {recompute} a step needs {needed}; leave "
            "recompute out, or use a finer tiling.grid"
        )


def _too_small(step: StepChoices, budget: int, besides: int) -> BudgetError:
    return BudgetError(
        f"memory.budget is {budget} bytes, but a training step on the largest tile needs {step.kept + besides}, and "
        f"{step.least() + besides} with all rebuilt that helps; use a finer tiling.grid, a smaller model, "
        "train.precision bf16, or parallel.halo layer on more ranks"
    )
