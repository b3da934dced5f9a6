"""The settings that `parallel.auto` leaves to the program: those of least predicted time for this run's ranks, network,
images and memory.

The root searches before anything is written, and sends the result to all ranks. A resumed run on as many ranks as
before keeps the settings of its checkpoint, however much memory is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tiledseg.checkpoint.saved_state import FoundSettings, SavedState
from tiledseg.comm.doing import doing, tick
from tiledseg.config.checks import AUTO
from tiledseg.config.parallel import REMOVED_MODES, SEARCHED, ParallelConfig
from tiledseg.config.run import Config
from tiledseg.config.words import REMOVED_SCHEDULES
from tiledseg.errors import ConfigError
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import parallelism
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.system.console import counted

_GROUPS = "data", "tiling", "model", "parallel", "memory"
_OF_TRAIN = "images_per_step", "precision", "tiles_per_batch", "loss", "ema"


def find_settings(
    question: RunQuestion, config: Config, machine: Machine | None, before: SavedState | None
) -> FoundSettings:
    """Choose the settings that the configuration leaves to the program. `before`: the state of the checkpoint that the
    run resumes; `machine`: the one that the ranks run on. Raises ConfigError if no settings fit."""
    from tiledseg.planning.search import search  # here: only runs with open settings need it

    earlier = before.found if before is not None and _basis(before.config.record()) == _basis(config.record()) else None
    removed = earlier and (earlier.parallel.halo in REMOVED_MODES or earlier.parallel.schedule in REMOVED_SCHEDULES)
    if earlier is not None and earlier.ranks == question.ranks and not removed:
        return earlier
    machine = question.machine or machine
    if machine is None or not machine.known:
        raise ConfigError(
            f"parallel.auto names {', '.join(config.parallel.auto)}, but no profile of this machine is known; "
            "give parallel.machine"
        )
    free = {name.removeprefix("parallel.") for name in config.parallel.auto}
    # The search plans one image of each size, with the grid of the tile stores. It drops steps that exceed the memory.
    rasters, held_out = (tuple(dict.fromkeys(extents)) for extents in (question.rasters, question.held_out))
    turned = tuple(sorted({rasters.index(question.rasters[place]) for place in question.turned}))
    stored = sorted({extent.grid for extent in rasters if extent.grid})
    if question.grid is None and len(stored) > 1:
        raise ConfigError(f"tile stores are cut by grids {stored[0]} and {stored[1]}; give tiling.grid, or one of them")
    grid = stored[0] if question.grid is None and stored else question.grid
    question = replace(question, rasters=rasters, held_out=held_out, turned=turned, grid=grid)
    question = replace(question, machine=machine, budgeted=False)
    with doing("looking for the quickest settings"):
        result = search(question, machine.ranks_per_host, free=free, tick=tick)
    candidate, plan = result.winner.candidate, result.winner.plan
    keys = candidate.keys(plan).items()
    chosen = {key: value for key, value in keys if key in free or getattr(config.parallel, key) == AUTO}
    tiling = replace(config.tiling, grid=list(candidate.grid)) if question.grid is None else config.tiling
    basis = "measured" if machine.measured else "by datasheets"
    reason = f"{result.reason}; by the profile of {machine.name}, {basis}"
    parallel = replace(config.parallel, auto=[], **chosen)
    return FoundSettings(question.ranks, tiling, parallel, reason, plan.blocks.shape if plan.blocks else None)


def with_settings(question: RunQuestion, config: Config, settings: FoundSettings) -> RunQuestion:
    """Return the question with these settings in place of the open ones. Raises ConfigError if they are refused."""
    replace(config, tiling=settings.tiling, parallel=settings.parallel).check()
    parallel = parallelism(settings.parallel)
    blocks = None
    if question.blocks is not None and settings.blocks is not None:
        blocks = replace(question.blocks, shape=settings.blocks, if_needed=False)
    store = question.store if parallel.stages == 1 and blocks is None else None
    return replace(question, parallel=parallel, grid=settings.tiling.grid_shape(), blocks=blocks, store=store)


def in_words(settings: FoundSettings, before: SavedState | None) -> str:
    """Return the user's line on the chosen settings: values, reason, and whether the run had them before."""
    plain = asdict(ParallelConfig())
    words = [
        f"{name} {json.dumps(value, separators=(',', ':')) if isinstance(value, list) else value}"
        for name, value in found_keys(settings).items()
        if name in ("tiling.grid", "parallel.halo") or value != plain[name.removeprefix("parallel.")]
    ]
    words += [f"memory.blocks [{settings.blocks[0]},{settings.blocks[1]}]"] if settings.blocks else []
    earlier, since = before.found if before is not None else None, ""
    if earlier is not None:
        since = ", as before" if earlier == settings else f", found anew (for {counted(earlier.ranks, 'rank')} before)"
    return f"parallel auto, {counted(settings.ranks, 'rank')}{since}: {', '.join(words)}; {settings.reason}"


def found_keys(settings: FoundSettings) -> dict[str, Any]:
    """Return the chosen value of each key that `parallel.auto` may name."""
    values = {f"parallel.{key}": getattr(settings.parallel, key) for key in SEARCHED}
    return {"tiling.grid": settings.tiling.grid, **values}


def _basis(record: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the values of a configuration that the choice depends on."""
    return [*(record[group] for group in _GROUPS), *(record["train"][key] for key in _OF_TRAIN)]
