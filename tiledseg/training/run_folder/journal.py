"""Lines of metrics, progress for a person, `progress.png` and the page of a run, by rank 0 while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiledseg.errors import OutputError
from tiledseg.execution.progress import StepProgress
from tiledseg.system.outputs import METRICS, PAGE, PROGRESS, STARTED
from tiledseg.system.writing import replacing
from tiledseg.training.run_folder.metrics import MetricsLog, read_metrics, write_whole
from tiledseg.training.run_folder.validations import ValidatedScene, read_validations, write_validation
from tiledseg.training.steps.step import StepResult

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings

T = TypeVar("T")
_DRAW_SECONDS = 30.0  # between drawings of the progress: one takes about half a second, while the other ranks wait


class Journal:
    """The records of a run of `total` steps that has done `step` of them, and has `lines` of metrics; its validations
    are of `scene`. `started`: the part of its summary that is known from the start. Close it before the last drawing.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        total: int,
        verbosity: int,
        started: Mapping[str, Any],
        lines: Sequence[Mapping[str, Any]],
        scene: ValidatedScene | None,
    ) -> None:
        self._folder, self._started, self._scene = folder, started, scene
        self._log = MetricsLog(folder, step, lines)
        write_whole(folder / STARTED, json.dumps(started, indent=1) + "\n")
        self.last_validation = last_validation([line for line in lines if line["step"] <= step])
        self._progress = StepProgress(total, step, verbosity)
        self._drawn = time.monotonic()

    def step(self, line: dict[str, Any]) -> None:
        """Write one line of metrics: see `step_line`."""
        self._log.write(line)
        self._progress.step(line)

    def part(self, items: Iterable[T], total: int, words: str) -> Iterator[T]:
        """Show a part of the work while it lasts: see `execution.progress.Shown`."""
        return self._progress.part(items, total, words)

    def validation(self, step: int, epoch: int, findings: Findings) -> None:
        """Write the files of a validation at the end of an epoch, and say its score."""
        assert self._scene is not None, "a run that validates says what its validations are of"
        self.last_validation = scores = findings.line()
        panel = write_validation(self._folder, step, epoch, findings, self._scene)
        self._log.write({"step": step, "epoch": epoch, "val": scores})
        if panel is not None:
            self._log.picture("val/panel", panel.picture, step)
        score = "-" if scores["mean_iou"] is None else f"{scores['mean_iou']:.4f}"
        self._progress.say(f"epoch {epoch}: validation mean IoU {score}")

    def say(self, words: str) -> None:
        """Say one line to the user; nothing if it is empty."""
        if words:
            self._progress.say(words)

    def draw(self, now: bool = False) -> None:
        """Draw the progress and the page; unless `now`, only if the last ones are some time ago."""
        if now or time.monotonic() - self._drawn > _DRAW_SECONDS:
            plot_progress(self._folder, self._started["title"], self._started["loss"])
            self._write_page(now)
            self._drawn = time.monotonic()

    def _write_page(self, last: bool) -> None:
        """Write the page. A fault stops no run, and is said with the last page."""
        from tiledseg.reporting.page import REMEDY
        from tiledseg.training.run_folder.page import write_report

        try:
            written = write_report(self._folder, self._folder / PAGE, None if last else self._started)
            reason = None if written else f"jinja2 or matplotlib is not installed: {REMEDY}"
        except OutputError as error:
            reason = str(error)
        if reason is not None and last:
            self._progress.say(f"warning: no {PAGE}: {reason}")

    def close(self) -> None:
        self._progress.close()
        self._log.close()


_OF_A_STEP = (
    *("loss", "pixels", "seconds", "data_seconds", "communication_seconds", "halo_bytes", "halo_messages"),
    "memory_bytes",
)


def step_line(step: int, epoch: int, tiles: int, rate: float, result: StepResult) -> dict[str, Any]:
    """Return a step as `metrics.jsonl` has it; `step` counts from 1."""
    line = {"step": step, "epoch": epoch, "lr": rate, "tiles": tiles, **{k: getattr(result, k) for k in _OF_A_STEP}}
    line["pixels_per_second"] = result.pixels / result.seconds
    if result.scale is not None:
        line |= {"loss_scale": result.scale, "skipped": result.skipped}
    if result.pipeline is not None:
        stages = result.pipeline
        line |= {"pipeline_bytes": stages.bytes, "pipeline_messages": stages.messages}
        line |= {"stage_seconds": list(stages.stage_seconds), "bubble_share": stages.bubble_share}
    return line


def last_validation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the scores of the last validation among the lines of a metrics file."""
    return next((line["val"] for line in reversed(lines) if "val" in line), None)


def plot_progress(folder: Path, title: str, loss: str) -> bool:
    """Draw the learning curves of a run; return False if matplotlib is not installed."""
    from tiledseg.reporting.curves import can_plot, draw_curves, png_of

    if not can_plot():
        return False
    data = png_of(draw_curves(read_metrics(folder / METRICS), read_validations(folder), loss, title))
    with replacing(folder / PROGRESS) as part:
        part.write_bytes(data)
    return True
