"""What would fit where memory is too small: settings that change speed alone, each tried by a plan of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

from tiledseg.errors import BudgetError, InputError
from tiledseg.planning.run.memory.blocks import BlocksAsked
from tiledseg.planning.run.memory.budget import in_words
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import RunQuestion

_FINER = (2, 3, 4, 6, 8)  # times the tiles along each dim
_RANKS = (2, 4, 8)  # times the ranks that there are


@contextmanager
def naming_settings(question: RunQuestion) -> Iterator[None]:
    """A budget that is refused within is refused with the settings that fit it; of grids with one alone."""
    try:
        yield
    except BudgetError as refused:
        found = settings_that_fit(question, question.memory, refused.finer)
        fits = f". By the plan this budget fits {', or '.join(found)}" if found else ""
        error = BudgetError(str(refused).replace(in_words(refused.finer), "") + fits)
        error.least = refused.least
        raise error from None


def settings_that_fit(question: RunQuestion, memory: int, finer: tuple[int, int] | None = None) -> tuple[str, ...]:
    """In words: those under which a step takes at most so many bytes; none of them changes the result. `finer`: a grid
    that is tried among others."""
    parallel = replace(question.parallel, timed=False)
    asked = replace(question, memory=memory, budgeted=False, parallel=parallel)  # what needs more is not asked here
    ways = (_recomputed, _in_a_file, partial(_finer, finer=finer), _of_more_ranks)
    found = (next((words for words, each in way(asked) if _fits(each)), None) for way in ways)
    return tuple(islice(filter(None, found), 3))


def _fits(question: RunQuestion) -> bool:
    try:
        return plan_run(question).memory <= question.memory or question.parallel.stages > 1
    except InputError:
        return False


def _recomputed(asked: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    stages = asked.parallel.stages
    if stages > 1:
        yield (
            "parallel.recompute always",
            replace(asked, parallel=replace(asked.parallel, recompute=("always",) * stages)),
        )


def _in_a_file(asked: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    if asked.parallel.stages == 1 and not (asked.blocks and asked.blocks.in_file):
        yield (
            "memory.blocks auto with memory.store",
            replace(asked, blocks=BlocksAsked(None, in_file=True), offload=False),
        )


def _finer(asked: RunQuestion, finer: tuple[int, int] | None) -> Iterator[tuple[str, RunQuestion]]:
    """Some grids, the coarsest first."""
    if asked.windows or asked.parallel.halo == "layer" or asked.grid is None:
        return
    grids = [(asked.grid[0] * times, asked.grid[1] * times) for times in _FINER] + [finer or asked.grid]
    for rows, cols in sorted(grids, key=math.prod):
        yield f"tiling.grid [{rows},{cols}]", replace(asked, grid=(rows, cols))


def _of_more_ranks(asked: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    """Where ranks share an image, the fewest first."""
    if asked.parallel.halo != "layer" or asked.parallel.mesh is not None:
        return
    for times in _RANKS:
        more = replace(asked, ranks=asked.ranks * times)
        yield f"{more.ranks} ranks", more
