"""The lines of `metrics.jsonl`, and the same numbers as TensorBoard events.

Rank 0 alone writes. Lines are flushed as they are made. On resume, lines of steps that the checkpoint does not know are
taken back, so the file of a resumed run is that of an uninterrupted one (but for times).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import OutputError
from tiledseg.system.outputs import EVENTS, METRICS, SUMMARY
from tiledseg.system.run_lock import is_at
from tiledseg.system.writing import replacing, writing


class MetricsLog:
    """A log of a JSON object a line in `folder`/metrics.jsonl, and the same numbers in TensorBoard where installed."""

    def __init__(self, folder: Path, keep_to_step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """`lines`: those that are there, as `read_metrics` gives them."""
        self.path = folder / METRICS
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= keep_to_step))
        with writing(self.path):
            self._file = self.path.open("ab", buffering=0)  # a line that the disk refuses is not tried again at the end
        self._events: Any = None
        self._opens_events: Callable[[], Any] | None = partial(_open_events, folder / EVENTS, keep_to_step)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line. Raises WriteError where the disk refuses it, or the file was moved away, so that the run would
        go on unseen; earlier lines stay."""
        with writing(self.path):
            if not is_at(self._file.fileno(), self.path):
                raise FileNotFoundError(errno.ENOENT, "moved away")
            text = memoryview((json.dumps(line) + "\n").encode())
            while text:
                text = text[self._file.write(text) :]
        with writing(self.path.with_name(EVENTS)):
            if self._opens_events is not None:  # with the first line: no step waits for TensorBoard's import
                self._events, self._opens_events = self._opens_events(), None
            if self._events is None:
                return
            for tag, value in _scalars(line).items():
                self._events.add_scalar(tag, value, line["step"])

    def picture(self, tag: str, picture_HWC: NDArray[np.uint8], step: int) -> None:
        """Hand TensorBoard a picture, if installed, after a line. Raises WriteError."""
        if self._events is not None:
            with writing(self.path.with_name(EVENTS)):
                self._events.add_image(tag, picture_HWC, step, dataformats="HWC")

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            with writing(self.path.with_name(EVENTS)):
                self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a metrics file but a last one that a crash has torn. Raises OutputError for other damage."""
    if not path.exists():
        return []
    *whole, torn = path.read_bytes().split(b"\n")
    lines = [_parse(line, path, number) for number, line in enumerate(whole, 1)]
    with contextlib.suppress(OutputError):  # a last line without its end, whole or not
        lines += [_parse(torn, path, len(lines) + 1)] if torn else []
    _check_steps(lines, path)
    return lines


def _check_steps(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise OutputError where a step does not follow the one before it."""
    steps = [(number, line["step"]) for number, line in enumerate(lines, 1) if "val" not in line]
    for (_, before), (number, step) in pairwise(steps):
        if step != before + 1:
            raise OutputError(
                f"{path}, line {number} is of step {step}, after one of step {before}; mend it, or move the file away "
                "to keep it"
            )


def check_lines(path: Path, step: int, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Raise OutputError where a metrics file, of these `lines`, has lost some of a run that has done `step` steps.

    A file that was moved away is a note: it says which steps the new one will not have.
    """
    if not path.exists():
        return f"{path} is gone: the new one starts after step {step}"
    last = max((line["step"] for line in lines if "val" not in line), default=0)
    if last < step:
        end = f"at step {last}" if last else "before the first step"
        raise OutputError(
            f"{path} ends {end}, the checkpoint is of step {step}: the lines between are lost; put the whole file "
            "back, or move this one away to start a new one"
        )
    return None


def check_none_lost(folder: Path, checkpoint_every: int) -> str | None:
    """Return a note on a folder without checkpoints in which a run begins; None for a new folder. Raises OutputError if
    its run has written checkpoints that are gone: to begin anew would remove its metrics too.

    A run has written one where it ended, or was stopped, and where it has done twice the steps between two.
    """
    metrics, done = folder / METRICS, 0
    with contextlib.suppress(OutputError):
        done = max((line["step"] for line in read_metrics(metrics) if "val" not in line), default=0)
    if done == 0:
        return None
    if (folder / SUMMARY).exists() or done > 2 * checkpoint_every:
        raise OutputError(
            f"{metrics} has {done} steps, but no checkpoint is left in {folder}; put the checkpoints back, or give "
            f"another run.output, or move {METRICS} away to begin anew"
        )
    return f"{metrics} has {done} steps, but there is no checkpoint of them: the run begins anew"


def _parse(text: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse one line of the metrics file."""
    try:
        line = json.loads(text)
        if _is_line(line):
            return line
    except (ValueError, RecursionError):
        pass
    raise OutputError(
        f"{path}, line {number} is no line of this run ({text[:40]!r}); mend it, or move the file away to keep it"
    )


def _is_line(line: object) -> TypeGuard[dict[str, Any]]:
    """Return True for an object with a step, and a loss or scores that can be drawn."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    scores = line.get("val", {"loss": line.get("loss"), "mean_iou": None})
    if not isinstance(scores, dict) or not {"loss", "mean_iou"} <= scores.keys():
        return False
    return all(isinstance(scores[key], (int, float, type(None))) for key in ("loss", "mean_iou"))


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one. Raises WriteError."""
    with replacing(path) as part:
        part.write_text(text)


def _open_events(folder: Path, purge_step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # here: an extra, and slow to import

    threading.excepthook = _events_hook(threading.excepthook)
    return SummaryWriter(str(folder), purge_step=purge_step + 1)


def _events_hook(former: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], object]:
    """Hide the traceback of TensorBoard's thread where the disk refuses a write: the writer's next call raises it."""

    def hook(arguments: threading.ExceptHookArgs) -> None:
        ours = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (ours and isinstance(arguments.exc_value, OSError)):
            former(arguments)

    return hook


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    if "val" in line:
        return {f"val/{k}": v for k, v in line["val"].items() if isinstance(v, float)}
    names = ("loss", "lr", "pixels_per_second", "data_seconds", "communication_seconds")
    return {f"train/{k}": line[k] for k in names if line[k] is not None}
