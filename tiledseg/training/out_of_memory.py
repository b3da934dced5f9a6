"""Memory that runs out while a run trains: one line that says what was asked, what there was, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tiledseg.errors import InputError, MemoryLimitError, first_line
from tiledseg.planning.run.plan import RunPlan, plan_run, setting_that_fits
from tiledseg.planning.run.question import RunQuestion

_LESS = 0.8, 0.6, 0.4  # of what was planned: the smallest budget may be too small for any choice


@contextmanager
def told_what_fits(question: RunQuestion, plan: RunPlan) -> Iterator[None]:
    """Memory that runs out within becomes a MemoryLimitError."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        from tiledseg.memory.exhausted import is_exhausted, what_was_asked

        if not is_exhausted(error):
            raise
        what = f"{what_was_asked(error)}; a step was planned to take {_planned(question, plan)} bytes"
        raise MemoryLimitError(f"{what}; use {_remedy(question, plan)} ({first_line(error)})") from error


def _planned(question: RunQuestion, plan: RunPlan) -> int:
    """Bytes of the rank that needs most."""
    if plan.rebuilt is not None or plan.pipeline is None:
        return plan.rebuilt.peak if plan.rebuilt else plan.memory
    from tiledseg.planning.run.pipeline import pipeline_bytes

    asked = question.parallel, question.graph, question.network.bands, plan.micro_batch
    return pipeline_bytes(*asked, plan.pipeline.balance)


def _remedy(question: RunQuestion, plan: RunPlan) -> str:
    """A smaller budget that the plan can meet with these settings, or else settings that meet it."""

    planned = _planned(question, plan)
    alike = replace(question, budgeted=True, parallel=replace(question.parallel, timed=False))
    for share in _LESS:
        budget = int(share * min(planned, question.memory))
        try:
            if plan_run(replace(alike, memory=budget)).memory <= budget or alike.parallel.stages > 1:
                return f"memory.budget {budget}"
        except InputError:
            continue
    budget = int(_LESS[0] * planned)
    setting = setting_that_fits(question, budget)
    return f"memory.budget {budget} with {setting}" if setting else "a smaller model, or more memory"
