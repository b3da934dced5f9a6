"""A run's folder: what the run writes there, and that nothing of it is anything else. Asked before the first write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tiledseg.checkpoint.folder import newest_step
from tiledseg.config.checks import shown
from tiledseg.errors import OutputError
from tiledseg.system import run_lock
from tiledseg.system.files import irregular_kind
from tiledseg.system.outputs import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    METRICS,
    PAGE,
    PROGRESS,
    STARTED,
    SUMMARY,
    VALIDATION,
    Output,
    check_outputs,
    whole,
)
from tiledseg.training.run_files import read_metrics

_KEY = "run.output"
_MOST_BYTES = 1 << 20  # of a configuration


def check_run_folder(folder: Path, inputs: Iterable[str | Path]) -> None:
    """Raise OutputError where the folder cannot be made or written, another run is in it, or a file that the run writes
    there is one of `inputs`, or is not what a run has there."""
    _check_place(folder)
    run_lock.check_free(folder)
    if not folder.exists():
        return
    sources = list(inputs)
    for name in (CHECKPOINTS, EVENTS, VALIDATION):
        _check_subfolder(folder / name, sources)
    own = folder / CONFIG
    if _is_record(own):  # a run may be started from its own record, which is written anew
        sources = [source for source in sources if not (own.exists() and os.path.samefile(own, source))]
    check_outputs(_outputs(folder), sources, folder)
    if own.exists() and not _is_record(own):
        raise OutputError(
            f"{own} was not written by a run, which would replace it; move it away, or give another {_KEY}"
        )


def check_unchanged(folder: Path, newest: int | None) -> None:
    """Raise OutputError where the newest checkpoint is not that of step `newest` any more: between the look at the
    folder and its lock, another run has been there."""
    now = newest_step(folder / CHECKPOINTS)
    if now != newest:
        raise OutputError(
            f"{folder} has been written by another run: its newest checkpoint was of step {newest} and is of step "
            f"{now}; run the command again"
        )


def _outputs(folder: Path) -> list[Output]:
    latest = [f"{CHECKPOINTS}/latest"] if (folder / CHECKPOINTS).is_dir() else []
    return [
        Output(_KEY, folder / run_lock.NAME),
        *(whole(_KEY, folder / name) for name in (CONFIG, METRICS, STARTED, SUMMARY, PROGRESS, PAGE, *latest)),
    ]


def _check_place(folder: Path) -> None:
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, say
        raise OutputError(f"{_KEY} is {shown(str(folder))}: {error.strerror}; give another folder") from None
    existing = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if irregular_kind(existing) != "a folder":
        raise OutputError(f"{_KEY} is {folder}, but {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{_KEY} is {folder}, but {existing} is not writable; give another folder")


def _check_subfolder(folder: Path, sources: Iterable[str | Path]) -> None:
    """Raise OutputError for a folder whose files the run removes and makes, if it is none, or inputs lie there."""
    if os.path.lexists(folder) and irregular_kind(folder) != "a folder":
        kind = irregular_kind(folder) or "a file"
        raise OutputError(f"{folder} is {kind}, where a run keeps a folder; move it away, or give another {_KEY}")
    if not folder.exists():
        return
    real = os.path.realpath(folder)
    for source in sources:
        if os.path.commonpath([real, os.path.realpath(source)]) == real:
            raise OutputError(f"the input {source} lies in {folder}, which the run changes; move it away")


def _is_record(path: Path) -> bool:
    """Return True for a configuration as runs write it: without comments, every key in its place."""
    try:
        text = path.read_text() if path.stat().st_size <= _MOST_BYTES else ""
        values = yaml.safe_load(text)
        return isinstance(values, dict) and yaml.safe_dump(values, sort_keys=False) == text
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False


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
