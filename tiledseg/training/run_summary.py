"""The contents of a run's `summary.json`, and the title of its page and pictures."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tiledseg.architecture.presets import crop_grid
from tiledseg.comm.diagnosis import report_rank
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.shapes import count_parameters
from tiledseg.planning.run.plan import RunPlan
from tiledseg.system.console import counted
from tiledseg.system.outputs import METRICS, STARTED, SUMMARY
from tiledseg.training.auto import found_keys
from tiledseg.training.preparation import Preparation


def facts_of(
    preparation: Preparation, mesh: Mesh, command: str = "", warnings: Sequence[str] = (), hosts: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the facts of `summary.json` that are known from the start, on the root, whose device and versions stand
    for all. `command`: as it was typed, but for the launcher; `hosts`: of all ranks."""
    own, plan, settings = report_rank(mesh, ask_mpi=False), preparation.plan, preparation.found
    weights = count_parameters(plan.network.graph(), plan.network.bands)  # on all stages together
    hosts = list(dict.fromkeys(hosts or [mesh.host]))
    return {
        "command": command,
        "begun": datetime.now().astimezone().isoformat(timespec="seconds"),
        "warnings": list(warnings),
        "machine": {
            "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
            "system": platform.platform(),
            "processor": platform.machine(),
            "device": own.device,
            "threads a rank": own.threads,
            "cores a rank": own.cores,
        },
        "versions": own.versions,
        "title": run_title(preparation, weights, mesh.size),
        "loss": preparation.objective.in_words,
        "class_weights": list(preparation.class_weights) or None,
        "ranks": mesh.size,
        "transport": mesh.transport,
        "parameters": weights,
        **windows_or_grids(preparation),
        **decisions(plan),
        "found": settings and {"ranks": settings.ranks, "keys": found_keys(settings), "reason": settings.reason},
        "classes": [record._asdict() for record in preparation.label_map.classes],
    }


def run_title(preparation: Preparation, weights: int, ranks: int) -> str:
    """Return one line: the run's name, its network, its data, and how it was spread."""
    plan, model, name = preparation.plan, preparation.config.model, Path(preparation.config.run.output).name
    stages, crops = f", {len(plan.pipeline.recompute)} stages" if plan.pipeline else "", crop_grid(model)
    return (
        f"{name}: {model.build or model.name}{f', {crops.in_words}' if crops else ''}, {weights:,} weights, "
        f"{counted(len(preparation.training.images), 'image')}, {counted(ranks, 'rank')}, "
        f"{preparation.config.train.precision}, halo: {plan.spread.mode}{stages}"
    )


def windows_or_grids(preparation: Preparation) -> dict[str, Any]:
    """Return the grids of tiles, or the windows, that a run trains on, and the halo in pixels."""
    plan, windows = preparation.plan, preparation.question.windows
    if windows is None:
        grids = [list(tiling.grid) for tiling in preparation.training.tilings]
        return {"grids": grids, "windows": None, "halo": plan.footprint.before}
    halo = plan.footprint.before if windows.exact else 0
    return {"grids": None, "windows": {**asdict(windows), "in_words": windows.in_words}, "halo": halo}


def seconds_so_far(folder: Path) -> float:
    """Return the wall time of a run's starts until now, before `started.json` is written anew. The summary has it; a
    start that was killed lasted until its last line of metrics. Return 0 where the files say nothing."""
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
    """Return the settings by which a run was spread, and kept in memory."""
    spread = asdict(plan.spread)
    rebuilt, blocks, pipeline = plan.rebuilt, plan.blocks, plan.pipeline and asdict(plan.pipeline)
    settings = pipeline and {key: pipeline.pop(key) for key in ("schedule", "recompute", "times")}
    return {
        "parallel": {"halo": spread.pop("mode"), **spread},
        "tiles_per_batch": plan.tiles_per_batch,
        "pipeline": pipeline and {**pipeline, "settings": settings},
        "rebuilt": rebuilt
        and {
            "tensors": [name for name, _ in rebuilt.items],
            "away": [name for name, _ in rebuilt.away],
            "bytes_kept_all": rebuilt.kept,
            "bytes": rebuilt.peak,
            "extra_time_share": round(rebuilt.extra, 4),
        },
        "blocks": blocks
        and {
            "shape": list(blocks.shape),
            "bytes": blocks.memory,
            "bytes_stored": blocks.stored,
            "in_file": blocks.in_file,
            "extra_time_share": round(blocks.extra, 4),
        },
    }
