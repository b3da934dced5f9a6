"""The schedules of pipelines by name, and which rank has which chunk: what configuration, plan and run share."""

from __future__ import annotations

from collections.abc import Callable

from tiledseg.errors import ConfigError

Ranks = tuple[int, ...]

_PLACEMENTS: dict[str, Callable[[Ranks], Ranks]] = {
    "1f1b": lambda ranks: ranks,
    "gpipe": lambda ranks: ranks,
    "folded": lambda ranks: ranks + ranks[-2::-1],
    "eager": lambda ranks: ranks,
}
SCHEDULES = tuple(_PLACEMENTS)
NEVER = "never"
RECOMPUTE = (NEVER, "except_last", "always")  # of which micro-batches a stage keeps inputs only
IN_STAGES = RECOMPUTE[1:]

Word = list[str] | str
"""Of what is computed once more: one for all stages, or one for each."""


def split_recompute(said: Word, shorthand: Word) -> tuple[Word, Word]:
    """Of what `memory.recompute` says, and of its shorthand for stages `parallel.recompute`: the word for nodes, and
    that for stages."""
    return ("auto", said) if isinstance(said, list) or said in IN_STAGES else (said, shorthand)


def chunk_ranks(schedule: str, stages: int) -> Ranks:
    """The rank of each chunk. Raises ConfigError for an unknown schedule, or fewer than 1 stage."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"the schedule is '{schedule}'; give one of {', '.join(SCHEDULES)}")
    if stages < 1:
        raise ConfigError(f"the pipeline has {stages} stages; give at least 1")
    return _PLACEMENTS[schedule](tuple(range(stages)))
