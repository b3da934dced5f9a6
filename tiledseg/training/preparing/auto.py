"""The settings that `parallel.auto` leaves to the program: those of least predicted time for the ranks, the network,
the images and the memory of this very run.

One rank searches, before anything is written, and all are handed what it has found: nobody waits for anybody. A run
that goes on asks its checkpoint first: on as many ranks it keeps its settings, however much memory is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tiledseg.checkpoint.saved_state import FoundSettings, SavedState
from tiledseg.comm.watching.doing import doing, tick
from tiledseg.config.checks import AUTO
from tiledseg.config.memory import recompute_of
from tiledseg.config.parallel import REMOVED_MODES, SEARCHED, ParallelConfig
from tiledseg.config.run import Config
from tiledseg.config.words import REMOVED_SCHEDULES
from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.console import counted

if TYPE_CHECKING:
    from tiledseg.planning.search.best import Searched

_GROUPS = "data", "tiling", "model", "parallel", "memory"
_OF_TRAIN = "images_per_step", "precision", "tiles_per_batch", "loss", "ema"


def find_settings(
    question: RunQuestion, config: Config, machine: Machine | None, before: SavedState | None
) -> FoundSettings:
    """What the configuration leaves to the program, for a run that asks `question`; `before`: of the checkpoint that
    the run goes on from. `machine`: what its ranks run on. Raises ConfigError where nothing can be."""
    from tiledseg.planning.search.best import search  # runs that leave nothing open need nothing of it

    earlier = before.found if before is not None and _asked(before.record) == _asked(_record(config)) else None
    if earlier is not None and earlier.ranks == question.ranks and not _removed(earlier.parallel):
        return earlier
    known = question.machine or machine
    if known is None or not known.known:
        raise ConfigError(
            f"parallel.auto names {', '.join(config.parallel.auto)}, but no machine is known by whose times to choose; "
            "give parallel.machine"
        )
    free = {name.removeprefix("parallel.") for name in config.parallel.auto}
    asked = _for_search(question, known)
    with doing("looking for the quickest settings"):
        found = search(asked, known.ranks_per_host, free=free, tick=tick)
    candidate = found.winner.candidate
    keys = candidate.keys(found.winner.plan)
    parallel = {key: value for key, value in keys.items() if key in free or getattr(config.parallel, key) == AUTO}
    tiling = replace(config.tiling, grid=list(candidate.grid)) if asked.grid is None else config.tiling
    settled = replace(config.parallel, auto=[], **parallel)
    blocks = found.winner.plan.blocks
    return FoundSettings(question.ranks, tiling, settled, _reason(found, known), blocks.shape if blocks else None)


def _removed(parallel: ParallelConfig) -> bool:
    """Return True for settings of an older version that this one refuses."""
    return parallel.halo in REMOVED_MODES or parallel.schedule in REMOVED_SCHEDULES


def with_settings(question: RunQuestion, config: Config, found: FoundSettings) -> RunQuestion:
    """The question of the same run with what was found given by hand. Raises ConfigError where it cannot be."""
    replace(config, tiling=found.tiling, parallel=found.parallel).check()
    asked = parallelism(found.parallel, recompute_of(config.memory, found.parallel).stages)
    blocks = None
    if question.blocks is not None and found.blocks is not None:
        blocks = replace(question.blocks, shape=found.blocks, if_needed=False)
    store = question.store if asked.stages == 1 and blocks is None else None
    return replace(question, parallel=asked, grid=found.tiling.grid_shape(), blocks=blocks, store=store)


def in_words(found: FoundSettings, before: SavedState | None) -> str:
    """One line for the user: what was found, and why rather than another; whether the run had it before."""
    plain = asdict(ParallelConfig())
    told = [
        f"{name} {json.dumps(value, separators=(',', ':')) if isinstance(value, list) else value}"
        for name, value in found_keys(found).items()
        if name in ("tiling.grid", "parallel.halo") or value != plain[name.removeprefix("parallel.")]
    ]
    told += [f"memory.blocks [{found.blocks[0]},{found.blocks[1]}]"] if found.blocks else []
    earlier = before.found if before is not None else None
    since = ""
    if earlier is not None:
        same = earlier == found
        since = ", as before" if same else f", found anew (for {counted(earlier.ranks, 'rank')} before)"
    return f"parallel auto, {counted(found.ranks, 'rank')}{since}: {', '.join(told)}; {found.reason}"


def found_keys(found: FoundSettings) -> dict[str, Any]:
    """All keys that can be left to the program, with their values, as somebody would give them by hand."""
    return {"tiling.grid": found.tiling.grid, **{f"parallel.{key}": getattr(found.parallel, key) for key in SEARCHED}}


def _record(config: Config) -> dict[str, Any]:
    """As a checkpoint has it."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return record


def _asked(record: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """What the choice rests on, of a configuration."""
    return [*(record[group] for group in _GROUPS), *(record["train"][key] for key in _OF_TRAIN)]


def _for_search(question: RunQuestion, machine: Machine) -> RunQuestion:
    """The question with one image of each size, on the machine; cut as tile stores are. A step that does not fit is
    discarded, and no error, whoever has said what the memory is."""
    rasters, held_out = (tuple(dict.fromkeys(extents)) for extents in (question.rasters, question.held_out))
    turned = tuple(sorted({rasters.index(question.rasters[place]) for place in question.turned}))
    stored = sorted({extent.grid for extent in rasters if extent.grid})
    if question.grid is None and len(stored) > 1:
        raise ConfigError(f"tile stores are cut by grids {stored[0]} and {stored[1]}; give tiling.grid, or one of them")
    grid = stored[0] if question.grid is None and stored else question.grid
    question = replace(question, rasters=rasters, held_out=held_out, turned=turned, grid=grid)
    return replace(question, machine=machine, budgeted=False)


def _reason(found: Searched, machine: Machine) -> str:
    basis = "measured" if machine.measured else "by datasheets"
    return f"{found.reason}; by the profile of {machine.name}, {basis}"
