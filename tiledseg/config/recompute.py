"""What is computed once more in the backward pass: `memory.recompute`, and its shorthand `parallel.recompute`."""

from __future__ import annotations

from typing import NamedTuple

from tiledseg.config.checks import shown
from tiledseg.config.memory import NONE, MemoryConfig
from tiledseg.config.parallel import ParallelConfig
from tiledseg.config.words import NEVER, split_recompute
from tiledseg.errors import ConfigError


class Recompute(NamedTuple):
    """`nodes`: auto, none, compact or all; `stages`: never, except_last or always for each."""

    nodes: str
    stages: tuple[str, ...]


def recompute_of(memory: MemoryConfig, parallel: ParallelConfig) -> Recompute:
    """What both keys say. Raises ConfigError where they contradict each other, or there are no such stages."""
    nodes, word = split_recompute(memory.recompute, parallel.recompute)
    said = nodes != memory.recompute  # it names stages
    if said and parallel.stages == 1:
        raise ConfigError(
            f"memory.recompute is {shown(word)}, but parallel.stages is 1, which is no pipeline; give compact or all, "
            "or set parallel.stages to 2 or more"
        )
    modes = parallel.recompute_modes("memory.recompute" if said else "parallel.recompute", word)
    differs = modes != parallel.recompute_modes() if said else nodes == NONE and {*modes} != {NEVER}
    if parallel.recompute != NEVER and differs:
        raise ConfigError(
            f"memory.recompute is {shown(memory.recompute)}, but its shorthand parallel.recompute is "
            f"{shown(parallel.recompute)}; leave parallel.recompute out"
        )
    return Recompute(str(nodes), modes)
