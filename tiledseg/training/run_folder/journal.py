"""Lines of metrics, progress for a person, `progress.png` and the page of a run, by rank 0 while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from tiledseg.errors import OutputError
from tiledseg.execution.progress import StepProgress, duration
from tiledseg.system.outputs import METRICS, PAGE, PROGRESS, STARTED
from tiledseg.system.writing import replacing
from tiledseg.training.run_folder.metrics import MetricsLog, read_metrics, write_whole
from tiledseg.training.run_folder.validations import ValidatedScene, read_validations, write_validation
from tiledseg.training.steps.step import StepResult

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings

T = TypeVar("T")
_DRAW_SECONDS = 30.0  # between drawings of the progress: one takes about half a second, while the other ranks wait
_RATE_STEPS = 20  # of the run so far that its rate is the median of
_ONCE_MORE = 4 / 3  # forward twice: a backward pass takes two forward passes' time


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
        """One line of metrics: see `step_line`."""
        self._log.write(line)
        self._progress.step(line)

    def part(self, items: Iterable[T], total: int, words: str) -> Iterator[T]:
        """A part of the work, shown while it lasts: see `execution.progress.Shown`."""
        return self._progress.part(items, total, words)

    def validation(self, step: int, epoch: int, findings: Findings) -> None:
        """What was found at the end of an epoch."""
        assert self._scene is not None, "a run that validates says what its validations are of"
        self.last_validation = found = findings.line()
        panel = write_validation(self._folder, step, epoch, findings, self._scene)
        self._log.write({"step": step, "epoch": epoch, "val": found})
        if panel is not None:
            self._log.picture("val/panel", panel.picture, step)
        score = "-" if found["mean_iou"] is None else f"{found['mean_iou']:.4f}"
        self._progress.say(f"epoch {epoch}: validation mean IoU {score}")

    def say(self, words: str) -> None:
        """One line for the person; none where there is nothing to say."""
        if words:
            self._progress.say(words)

    def draw(self, now: bool = False) -> None:
        """The progress as a picture, and the page; unless `now`, only where the last ones are some time ago."""
        if now or time.monotonic() - self._drawn > _DRAW_SECONDS:
            plot_progress(self._folder, self._started["title"], self._started["loss"])
            self._write_page(now)
            self._drawn = time.monotonic()

    def _write_page(self, last: bool) -> None:
        """The page; what stops it stops no run, and is said with the last one."""
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


def step_line(step: int, epoch: int, tiles: int, rate: float, result: StepResult) -> dict[str, Any]:
    """A step as `metrics.jsonl` has it; `step` counts from 1."""
    line: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "loss": result.loss,
        "lr": rate,
        "tiles": tiles,
        "pixels": result.pixels,
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "communication_seconds": result.communication_seconds,
        "pixels_per_second": result.pixels / result.seconds,
        "halo_bytes": result.halo_bytes,
        "halo_messages": result.halo_messages,
        "memory_bytes": result.memory_bytes,
    }
    if result.scale is not None:
        line |= {"loss_scale": result.scale, "skipped": result.skipped}
    if result.pipeline is not None:
        line |= {
            "pipeline_bytes": result.pipeline.bytes,
            "pipeline_messages": result.pipeline.messages,
            "stage_seconds": list(result.pipeline.stage_seconds),
            "bubble_share": result.pipeline.bubble_share,
        }
    return line


def last_validation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The scores of the last validation among the lines of a metrics file."""
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


def expected_time(planned: float | None, looks_first: bool, lines: Sequence[Mapping[str, Any]], left: int) -> str:
    """Return a sentence on the duration of the `left` steps; empty if there are none.

    `planned`: measured seconds of a step's passes, which with stages go forward once more if the loss `looks_first`;
    `lines`: of metrics of the steps done.
    """
    if not left:
        return ""
    steps = f"{left} steps" if left > 1 else "1 step"
    if planned is not None:
        seconds = planned * (_ONCE_MORE if looks_first else 1)
        return (
            f"predicted: {in_words(seconds)} a step, {duration(seconds * left)} for {steps}, by the measured times of "
            "layers and messages; reading and validation come besides"
        )
    done = [line["seconds"] for line in lines if "seconds" in line][-_RATE_STEPS:]
    if done:
        seconds = median(done)
        return (
            f"the last {len(done)} steps took {in_words(seconds)} each (median): at that rate "
            f"{duration(seconds * left)} for {steps} left"
        )
    return f"no time is predicted for {steps}: no rate is known before the first"


def in_words(seconds: float) -> str:
    """Return a step's time in three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
