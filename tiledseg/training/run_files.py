"""A run's folder: the check before the first write that it holds no foreign files, and the reading of its files.

Rank 0 alone writes. A run resumed from a checkpoint removes the validation files and metrics of later steps.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tiledseg.config.checks import shown
from tiledseg.errors import OutputError
from tiledseg.system import run_lock
from tiledseg.system.files import irregular_kind
from tiledseg.system.outputs import (
    CHECKPOINTS,
    CONFIG,
    FOLDERS,
    METRICS,
    SUMMARY,
    VALIDATION,
    WHOLE,
    Output,
    check_outputs,
    whole,
)

_KEYS = {"step", "epoch", "mean_iou", "accuracy", "pixels", "classes", "confusion_matrix", "reliability", "panel"}
_OWN = re.compile(r"\.?step-(\d{6,})\.(json|png)(\.part)?")


def own_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of each validation file in a run's folder, in order of steps."""
    matches = [(_OWN.fullmatch(path.name), path) for path in sorted((folder / VALIDATION).glob("*step-*"))]
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_validations(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of every validation, in order of steps; files without all keys are skipped."""
    texts = (read_json(path) for _, path in own_files(folder) if path.suffix == ".json")
    return [figures for figures in texts if figures.keys() >= _KEYS]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; a last line torn by a crash is dropped. Raises OutputError for other damage,
    and if a step does not follow the one before it."""
    texts, lines, following = path.read_bytes().split(b"\n") if path.exists() else [b""], [], None
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            scores = line.get("val", {"loss": line.get("loss"), "mean_iou": None})
            drawn = [isinstance(scores[key], (int, float, type(None))) for key in ("loss", "mean_iou")]
            known = all(drawn) and type(line.get("step")) is int
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            known = False
        if not known and number == len(texts):
            break
        if not known or ("val" not in line and following not in (None, line["step"])):
            raise OutputError(
                f"{path}, line {number} is no line of this run, or its step does not follow ({text[:40]!r}); mend it, "
                "or move the file away to keep it"
            )
        if "val" not in line:
            following = line["step"] + 1
        lines.append(line)
    return lines


_KEY = "run.output"
_MOST_BYTES = 1 << 20  # of a configuration


def check_run_folder(folder: Path, inputs: Iterable[str | Path]) -> None:
    """Raise OutputError if the folder cannot be made or written, if another run uses it, or if a file that the run
    would write is one of `inputs` or was not written by a run."""
    existing = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    try:  # to write: permission bits say little for a superuser, or on a network file system
        tempfile.TemporaryFile(dir=existing).close()
        with suppress(FileNotFoundError):
            os.lstat(folder)  # raises for a name that is too long
    except OSError as error:
        reason = f"{existing} is not writable ({error.strerror})"
        raise OutputError(f"{_KEY} is {shown(str(folder))}, but {reason}; give another folder") from None
    run_lock.check_free(folder)
    if not folder.exists():
        return
    own = folder / CONFIG
    record = _is_record(own)  # a run may start from its own record, which it then rewrites
    sources = [source for source in inputs if not (record and os.path.exists(source) and os.path.samefile(own, source))]
    for part in (folder / name for name in FOLDERS if os.path.lexists(folder / name)):  # which it removes from, adds to
        kind, real = irregular_kind(part) or "a file", os.path.realpath(part)
        if kind != "a folder":
            raise OutputError(f"{part} is {kind}, where a run keeps a folder; move it away, or give another {_KEY}")
        for source in sources:
            if Path(os.path.realpath(source)).is_relative_to(real):
                raise OutputError(f"the input {source} lies in {part}, which the run changes; move it away")
    saved = (folder / CHECKPOINTS).is_dir()
    names = [*WHOLE, *([f"{CHECKPOINTS}/latest"] if saved else [])]
    outputs = [Output(_KEY, folder / run_lock.NAME), *(whole(_KEY, folder / name) for name in names)]
    check_outputs(outputs, sources, folder)
    checked = [] if record else [CONFIG] if saved else names  # a run writes its configuration first
    for other in (folder / name for name in checked if os.path.lexists(folder / name)):
        raise OutputError(
            f"{other} was not written by a run, which would replace it; move it away, or give another {_KEY}"
        )


def _is_record(path: Path) -> bool:
    """Return True for a configuration written by a run: plain YAML without comments, in the order of its keys."""
    try:
        text = path.read_text() if path.stat().st_size <= _MOST_BYTES else ""
        values = yaml.safe_load(text)
        return isinstance(values, dict) and yaml.safe_dump(values, sort_keys=False) == text
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False


def check_metrics(folder: Path, step: int | None, checkpoint_every: int) -> list[str]:
    """Return a warning if the metrics in a run's folder are not those of `step` steps (None: of a new run).

    Raises OutputError for metrics that no run has written, if lines before `step` are missing, and for a new run if
    the folder's run must have written checkpoints: the new one would remove its metrics. A run must have written one if
    it has a summary, or more than twice `checkpoint_every` steps.
    """
    path = folder / METRICS
    last = max((line["step"] for line in read_metrics(path) if "val" not in line), default=0)
    if step is None and not last:
        return []
    if step is None and ((folder / SUMMARY).exists() or last > 2 * checkpoint_every):
        raise OutputError(
            f"{path} has {last} steps, but no checkpoint is left in {folder}; put the checkpoints back, or give "
            f"another run.output, or move {METRICS} away to begin anew"
        )
    if step is None:
        return [f"{path} has {last} steps, but there is no checkpoint of them: the run begins anew"]
    if not path.exists():
        return [f"{path} is gone: the new one starts after step {step}"]
    if last < step:
        raise OutputError(
            f"{path} ends at step {last}, the checkpoint is of step {step}: the lines between are lost; put the whole "
            "file back, or move this one away to start a new one"
        )
    return []
