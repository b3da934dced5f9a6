"""The contents of a run's `summary.json`, and the title of its page and pictures."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.comm.diagnosis import report_rank
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.shapes import count_parameters
from tiledseg.planning.run.blocks import BlockPlan
from tiledseg.planning.run.plan import RunPlan
from tiledseg.raster.statistics import Normalization
from tiledseg.system.console import counted
from tiledseg.system.outputs import METRICS, STARTED, SUMMARY
from tiledseg.training.preparing.auto import found_keys
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.training.run_folder.validations import ValidatedScene

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice


@dataclass(frozen=True)
class About:
    """Facts of a start. `command`: as it was typed, but for the launcher; `hosts`: of all ranks; `begun`: ISO 8601."""

    command: str = ""
    warnings: Sequence[str] = ()
    hosts: Sequence[str] = ()
    begun: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """Return the facts for `summary.json`, on the root, whose device and versions stand for all."""
        own = report_rank(mesh, ask_mpi=False)
        hosts = list(dict.fromkeys(self.hosts or [mesh.host]))
        return {
            "command": self.command,
            "begun": self.begun,
            "warnings": list(self.warnings),
            "machine": {
                "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
                "system": platform.platform(),
                "processor": platform.machine(),
                "device": own.device,
                "threads a rank": own.threads,
                "cores a rank": own.cores,
            },
            "versions": own.versions,
        }


def facts_of(preparation: Preparation, name: str, mesh: Mesh) -> dict[str, Any]:
    """Return the facts of the summary that are known from the start."""
    return {
        "title": run_title(preparation, name, mesh.size),
        "loss": preparation.objective.in_words,
        "class_weights": list(preparation.class_weights) or None,
        "ranks": mesh.size,
        "transport": mesh.transport,
        "parameters": weights_of(preparation.plan),
        **windows_or_grids(preparation),
        **decisions(preparation.plan),
        "found": found_settings(preparation),
        "classes": [record._asdict() for record in preparation.label_map.classes],
    }


def scene_of(preparation: Preparation, normalization: Normalization) -> ValidatedScene | None:
    """Return the material of the run's validations; None if it has none."""
    held_out, label_map = preparation.validation, preparation.label_map
    if held_out is None:
        return None
    return ValidatedScene(
        label_map.classes, label_map.ignore_index, held_out.images, held_out.infos[0].dtype, normalization
    )


def run_title(preparation: Preparation, name: str, ranks: int) -> str:
    """In one line: the run's name, its network, its data, and how it was spread."""
    plan = preparation.plan
    stages = f", {len(plan.pipeline.recompute)} stages" if plan.pipeline else ""
    return (
        f"{name}: {preparation.recipe.title}, {weights_of(plan):,} weights, "
        f"{counted(len(preparation.training.images), 'image')}, {counted(ranks, 'rank')}, "
        f"{preparation.recipe.precision}, halo: {plan.spread.mode}{stages}"
    )


def weights_of(plan: RunPlan) -> int:
    """The network's weights, on all stages together."""
    return count_parameters(plan.network.graph(), plan.network.bands)


def windows_or_grids(preparation: Preparation) -> dict[str, Any]:
    """What a run has trained on, as `summary.json` says it: tiles of these grids, or windows; the halo in pixels."""
    plan, windows = preparation.plan, preparation.question.windows
    if windows is None:
        grids = [list(tiling.grid) for tiling in preparation.training.tilings]
        return {"grids": grids, "windows": None, "halo": plan.footprint.before}
    halo = plan.footprint.before if windows.exact else 0
    return {"grids": None, "windows": {**asdict(windows), "in_words": windows.in_words}, "halo": halo}


def seconds_so_far(folder: Path) -> float:
    """Wall time of a run's starts until now, on the root, before `started.json` is written anew: as the summary says
    it; of a start that was killed until its last line of metrics. 0 where the files say nothing."""
    try:
        started = json.loads((folder / STARTED).read_text())
        with suppress(FileNotFoundError):
            summary = json.loads((folder / SUMMARY).read_text())
            if summary["begun"] == started["begun"]:
                return float(summary["seconds"])
        begun = datetime.fromisoformat(started["begun"]).timestamp()
        return float(started["seconds_before"]) + max(0.0, (folder / METRICS).stat().st_mtime - begun)
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def decisions(plan: RunPlan) -> dict[str, Any]:
    """How a run was spread, as `summary.json` says it."""
    spread = asdict(plan.spread)
    parallel = {"halo": spread.pop("mode"), **spread}
    found: dict[str, Any] = {"parallel": parallel, "tiles_per_batch": plan.tiles_per_batch, "pipeline": None}
    found["rebuilt"] = _rebuilt(plan.rebuilt) if plan.rebuilt else None
    found["blocks"] = _blocks(plan.blocks) if plan.blocks else None
    if plan.pipeline is None:
        return found
    pipeline = asdict(plan.pipeline)
    settings = {key: pipeline.pop(key) for key in ("schedule", "recompute", "times")}
    return {**found, "pipeline": {**pipeline, "settings": settings}}


def found_settings(preparation: Preparation) -> dict[str, Any] | None:
    """What `parallel.auto` has left to the program, by key, for how many ranks, and why."""
    found = preparation.found
    if found is None:
        return None
    return {"ranks": found.ranks, "keys": found_keys(found), "reason": found.reason}


def _blocks(plan: BlockPlan) -> dict[str, Any]:
    """Rows and columns of blocks of a tile; bytes of a step, and of what lies between segments; predicted time."""
    return {
        "shape": list(plan.shape),
        "bytes": plan.memory,
        "bytes_stored": plan.stored,
        "in_file": plan.in_file,
        "extra_time_share": round(plan.extra, 4),
    }


def _rebuilt(choice: MemoryChoice) -> dict[str, Any]:
    """What is computed once more in place of being kept: names; bytes of a step; predicted time, as a share of it."""
    return {
        "tensors": [name for name, _ in choice.items],
        "away": [name for name, _ in choice.away],
        "bytes_kept_all": choice.kept,
        "bytes": choice.peak,
        "extra_time_share": round(choice.extra, 4),
        "gap": round(choice.gap, 4),
    }
