"""The records that rank 0 writes while a run trains: lines of metrics, TensorBoard events, progress on the console,
`progress.png`, the page; and the facts of `summary.json`.

`metrics.jsonl` has one JSON object a line. A resumed run removes the lines of steps after its checkpoint, so its file
equals that of an uninterrupted run, except for times.
"""

from __future__ import annotations

import errno
import json
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.presets import crop_grid
from tiledseg.comm.diagnosis import report_rank
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import InputError, installed
from tiledseg.execution.progress import StepProgress
from tiledseg.geometry.shapes import count_parameters
from tiledseg.planning.run.plan import RunPlan
from tiledseg.system.console import counted
from tiledseg.system.files import replacing, write_whole, writing
from tiledseg.system.outputs import EVENTS, METRICS, PAGE, PROGRESS, STARTED, SUMMARY
from tiledseg.system.run_lock import is_at
from tiledseg.training.preparation import Preparation
from tiledseg.training.run_files import read_json, read_metrics, read_validations

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Facts = Mapping[str, Any]
_DRAW_SECONDS = 30.0  # between two drawings: one takes about half a second, for which the other ranks wait
_SCALARS = "loss", "lr", "pixels_per_second", "data_seconds", "communication_seconds"


class Journal:
    """The records of a run of `total` steps that has done `step` of them; lines of later steps go. `started`: the facts
    of its summary that are known from the start."""

    def __init__(self, folder: Path, step: int, total: int, verbosity: int, started: Facts) -> None:
        self._folder, self._started, self._step, self.path = folder, started, step, folder / METRICS
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        with writing(self.path):
            self._file = self.path.open("ab", buffering=0)  # so a line refused by the disk is not retried at close
        write_whole(folder / STARTED, json.dumps(started, indent=1) + "\n")
        self.last_validation: dict[str, Any] | None = next((o["val"] for o in reversed(kept) if "val" in o), None)
        self._events: Any = None
        self._writes_events = installed("tensorboard")
        self.progress = StepProgress(total, step, verbosity)
        self._drawn = time.monotonic()

    def step(self, line: dict[str, Any]) -> None:
        """Write one line of metrics."""
        self._write(line, {f"train/{key}": line[key] for key in _SCALARS if line[key] is not None})
        self.progress.step(line)

    def validation(self, step: int, epoch: int, scores: dict[str, Any], panel: NDArray[np.uint8] | None) -> None:
        """Write the line of an epoch's validation, and print its score."""
        self.last_validation = scores
        numbers = {f"val/{key}": value for key, value in scores.items() if isinstance(value, float)}
        self._write({"step": step, "epoch": epoch, "val": scores}, numbers)
        if panel is not None and self._events is not None:
            with writing(self._folder / EVENTS):
                self._events.add_image("val/panel", panel, step, dataformats="HWC")
        score = "-" if scores["mean_iou"] is None else f"{scores['mean_iou']:.4f}"
        pairs = zip(scores.get("iou", ()), self._started.get("classes", ()), strict=False)
        scored = [(iou, record["name"]) for iou, record in pairs if iou is not None]
        if len(scored) > 1:
            iou, name = min(scored)
            score += f", weakest {name} {iou:.4f}"
        self.progress.say(f"epoch {epoch}: validation mean IoU {score}")

    def _write(self, line: dict[str, Any], numbers: Mapping[str, float]) -> None:
        """Write a line, and its numbers as events. Raises WriteError if the disk refuses it, or if the file was moved
        away; earlier lines stay."""
        with writing(self.path):
            if not is_at(self._file.fileno(), self.path):
                raise FileNotFoundError(errno.ENOENT, "moved away")
            text = memoryview((json.dumps(line) + "\n").encode())
            while text:
                text = text[self._file.write(text) :]
        if not self._writes_events:
            return
        with writing(self._folder / EVENTS):
            if self._events is None:  # opened with the first line: a run without steps does not import TensorBoard
                from torch.utils.tensorboard import SummaryWriter

                threading.excepthook = partial(_on_thread_error, threading.excepthook)
                self._events = SummaryWriter(str(self._folder / EVENTS), purge_step=self._step + 1)
            for tag, value in numbers.items():
                self._events.add_scalar(tag, value, line["step"])

    def draw(self, now: bool = False) -> None:
        """Draw the progress and the page, at most every `_DRAW_SECONDS` unless `now`. A fault of the page stops no run;
        the last drawing prints it."""
        if not now and time.monotonic() - self._drawn <= _DRAW_SECONDS:
            return
        from tiledseg.training.run_page import write_report

        plot_progress(self._folder, self._started["title"], self._started["loss"])
        try:
            write_report(self._folder, self._folder / PAGE)
        except InputError as error:
            if now:
                self.progress.say(f"warning: no {PAGE}: {error}")
        self._drawn = time.monotonic()

    def close(self) -> None:
        self.progress.close()
        self._file.close()
        if self._events is not None:
            with writing(self._folder / EVENTS):
                self._events.close()


def plot_progress(folder: Path, title: str, loss: str) -> None:
    """Draw the learning curves of a run, if matplotlib is installed."""
    from tiledseg.reporting.page import draw_curves, png_of

    if installed("matplotlib"):
        data = png_of(draw_curves(read_metrics(folder / METRICS), read_validations(folder), loss, title))
        with replacing(folder / PROGRESS) as part:
            part.write_bytes(data)


def _on_thread_error(former: Callable[[Any], object], arguments: Any) -> None:
    """Hide the traceback of TensorBoard's thread if the disk refuses a write; the writer's next call raises it."""
    ours = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (ours and isinstance(arguments.exc_value, OSError)):
        former(arguments)


def facts_of(preparation: Preparation, mesh: Mesh, command: str, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the facts of `summary.json` that the root knows at the start; device and versions are the root's.
    `command`: as typed, without the launcher; `hosts`: of all ranks."""
    own, plan = report_rank(mesh, ask_mpi=False), preparation.plan
    weights = count_parameters(plan.network.graph(), plan.network.bands)  # on all stages together
    hosts = list(dict.fromkeys(hosts))
    config, windows = preparation.config, preparation.question.windows
    stages, crops = f", {len(plan.pipeline.recompute)} stages" if plan.pipeline else "", crop_grid(config.model)
    title = (  # the run's name, its network, its data, and how it was spread
        f"{Path(config.run.output).name}: {config.model.build or config.model.name}"
        f"{f', {crops.in_words}' if crops else ''}, {weights:,} weights, "
        f"{counted(len(preparation.training.images), 'image')}, {counted(mesh.size, 'rank')}, "
        f"{config.train.precision}, halo: {plan.spread.mode}{stages}"
    )
    return {
        "command": command,
        "begun": datetime.now().astimezone().isoformat(timespec="seconds"),
        "warnings": list(preparation.warnings),
        "machine": {
            "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
            "system": platform.platform(),
            "processor": platform.machine(),
            "device": own["device"],
            "threads a rank": own["threads"],
            "cores a rank": own["cores"],
        },
        "versions": own["versions"],
        "title": title,
        "loss": preparation.objective.in_words,
        "class_weights": list(preparation.class_weights) or None,
        "ranks": mesh.size,
        "transport": mesh.transport,
        "parameters": weights,
        "grids": [list(tiling.grid) for tiling in preparation.training.tilings] if windows is None else None,
        "windows": {**asdict(windows), "in_words": windows.in_words} if windows else None,
        "halo": plan.footprint.before if windows is None or windows.exact else 0,
        **decisions(plan),
        "classes": [record._asdict() for record in preparation.label_map.classes],
    }


def seconds_so_far(folder: Path) -> float:
    """Return the wall seconds of a run's earlier starts, from its summary; 0 if the files do not tell. A start that was
    killed lasted until its last line of metrics. Call before `started.json` is rewritten."""
    started, summary = read_json(folder / STARTED), read_json(folder / SUMMARY)
    try:
        if summary and summary["begun"] == started["begun"]:
            return float(summary["seconds"])
        begun = datetime.fromisoformat(started["begun"]).timestamp()
        return float(started["seconds_before"]) + max(0.0, (folder / METRICS).stat().st_mtime - begun)
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def decisions(plan: RunPlan) -> dict[str, Any]:
    """Return a plan's parallel and memory settings for `summary.json`."""
    spread, rebuilt = asdict(plan.spread), plan.rebuilt
    return {
        "parallel": {"halo": spread.pop("mode"), **spread},
        "tiles_per_batch": plan.tiles_per_batch,
        "pipeline": plan.pipeline and asdict(plan.pipeline),
        "blocks": plan.blocks and asdict(plan.blocks),
        "rebuilt": rebuilt
        and {
            "tensors": [name for name, _ in rebuilt.items],
            "away": [name for name, _ in rebuilt.away],
            "bytes_kept_all": rebuilt.kept,
            "bytes": rebuilt.peak,
            "extra_time_share": round(rebuilt.extra, 4),
        },
    }
