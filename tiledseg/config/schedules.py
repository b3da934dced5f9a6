"""The schedules of pipelines by name, and which rank has which chunk: what configuration, plan and run share."""

from __future__ import annotations

from tiledseg.config.checks import one_of
from tiledseg.errors import ConfigError

Ranks = tuple[int, ...]

SCHEDULES = ("1f1b", "gpipe", "folded")
REMOVED_SCHEDULES = {"eager": "1f1b"}
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
    """Return the rank of each chunk. Raise ConfigError for an unknown schedule, or fewer than 1 stage."""
    one_of("the schedule", schedule, SCHEDULES, REMOVED_SCHEDULES)
    if stages < 1:
        raise ConfigError(f"the pipeline has {stages} stages; give at least 1")
    ranks = tuple(range(stages))
    return ranks + ranks[-2::-1] if schedule == "folded" else ranks
