"""The lines of `metrics.jsonl`, a JSON object each, as a run that goes on finds them.

Rank 0 alone writes. On resume, lines of steps that the checkpoint does not know are taken back, so the file of a
resumed run is that of an uninterrupted one (but for times).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tiledseg.errors import OutputError
from tiledseg.system.outputs import METRICS, SUMMARY
from tiledseg.system.writing import replacing


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a metrics file but a last one that a crash has torn. Raises OutputError for other damage, and
    where a step does not follow the one before it."""
    texts, lines, before = path.read_bytes().split(b"\n") if path.exists() else [b""], [], None
    for number, text in enumerate(texts, 1):
        line = _parsed(text)
        if line is None:
            if number == len(texts):
                break
            raise OutputError(
                f"{path}, line {number} is no line of this run ({text[:40]!r}); mend it, or move the file away to keep "
                "it"
            )
        if "val" not in line:
            if before is not None and line["step"] != before + 1:
                raise OutputError(
                    f"{path}, line {number} is of step {line['step']}, after one of step {before}; mend it, or move "
                    "the file away to keep it"
                )
            before = line["step"]
        lines.append(line)
    return lines


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return an object with a step, and a loss or scores that can be drawn; None for other text."""
    try:
        line = json.loads(text)
        scores = line.get("val", {"loss": line.get("loss"), "mean_iou": None})
        numbers = scores["loss"], scores["mean_iou"]
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return None
    drawable = all(isinstance(number, (int, float, type(None))) for number in numbers)
    return line if drawable and type(line.get("step")) is int else None


def steps_done(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the last step of the lines of a metrics file; 0 without one."""
    return max((line["step"] for line in lines if "val" not in line), default=0)


def check_lines(path: Path, step: int, lines: Iterable[Mapping[str, Any]]) -> str | None:
    """Raise OutputError where a metrics file, of these `lines`, has lost some of a run that has done `step` steps.

    A file that was moved away is a note: it says which steps the new one will not have.
    """
    if not path.exists():
        return f"{path} is gone: the new one starts after step {step}"
    last = steps_done(lines)
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
        done = steps_done(read_metrics(metrics))
    if done == 0:
        return None
    if (folder / SUMMARY).exists() or done > 2 * checkpoint_every:
        raise OutputError(
            f"{metrics} has {done} steps, but no checkpoint is left in {folder}; put the checkpoints back, or give "
            f"another run.output, or move {METRICS} away to begin anew"
        )
    return f"{metrics} has {done} steps, but there is no checkpoint of them: the run begins anew"


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one. Raises WriteError."""
    with replacing(path) as part:
        part.write_text(text)
