"""Checkpoints: safetensors for tensors, JSON for the rest, written atomically.

A checkpoint is a folder `step-XXXXXX` with `model.safetensors`, `optimizer.safetensors` and `manifest.json`, which has
the SHA-256 of every file (and of its own content), the configuration, the position and the facts that prediction needs.
It is written under a temporary name, synced to the disk and renamed; the file `latest` then names it. Loading reads
only numbers and text: no code in a checkpoint can run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from tiledseg.checkpoint.check import (
    AVERAGE,
    FORMAT,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Checkpoint,
    DamagedCheckpointError,
    own_checksum,
    sha256,
    verified,
)
from tiledseg.comm.doing import tick
from tiledseg.errors import CheckpointError
from tiledseg.memory.device import asked_back
from tiledseg.models.frozen import by_memory
from tiledseg.system.files import delete, flush, write_whole, writing
from tiledseg.system.outputs import files_below

_LATEST, BEST = "latest", "best"
_NO_BEST = "it was trained without train.best, or has not been validated yet; leave --which out"
_PARTIAL = ".partial-"
_NAME = re.compile(r"step-(\d{6,})")


Contents = dict[str, dict[str, torch.Tensor]]
"""The tensors of a checkpoint, on the CPU, by file and name; with stages, a rank's own part. Weights have the network's
names, the optimizer's state `index.entry`, with a parameter's index in the whole network."""


def contents_of(
    network: nn.Module, optimizer: torch.optim.Optimizer, average: Mapping[str, torch.Tensor] | None = None
) -> Contents:
    """Return this rank's part of a checkpoint, without tensors on the meta device, which are another stage's. A CPU's
    contiguous tensors are not copied."""
    numbers, state = numbers_of(optimizer), optimizer.state_dict()["state"]
    files: Contents = {
        MODEL: {name: tensor for name, tensor in network.state_dict().items() if not tensor.is_meta},
        OPTIMIZER: {
            f"{numbers[index]}.{name}": torch.as_tensor(value)
            for index, entries in state.items()
            for name, value in entries.items()
            if value is not None
        },
        **({AVERAGE: dict(average)} if average else {}),
    }
    on_host = iter(asked_back(*(tensor.detach() for own in files.values() for tensor in own.values()))())
    return {file: {name: next(on_host).contiguous() for name in own} for file, own in files.items()}


def numbers_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return each parameter's number in the network, in the optimizer's order, group by group."""
    numbers: list[int] = []
    for group in optimizer.param_groups:
        numbers += group.get("indices", range(len(numbers), len(numbers) + len(group["params"])))
    return numbers


def save_checkpoint(
    folder: Path, contents: Contents, state: Mapping[str, Any], keep: int, best: int | None = None
) -> Path:
    """Write `folder`/step-XXXXXX and let `latest` name it, and `best` if the state's step is `best`; then delete all
    but the newest `keep` and the best. One rank calls it.

    The law: if it ends at any moment, every older checkpoint is whole until the new one is. There must be no checkpoint
    of a later step (see `rewind`). Raises WriteError if the disk refuses, and deletes the partial checkpoint.
    """
    final = folder / name_of(state["step"])
    with writing(final):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{_PARTIAL}{final.name}"
        delete(partial)
        partial.mkdir()
        try:
            _write(partial, contents, state)
            _remove(final)  # a damaged one, if the run was resumed from an older one
            os.replace(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        write_whole(folder / _LATEST, final.name + "\n")
        if best == state["step"]:
            write_whole(folder / BEST, final.name + "\n")
        flush(folder)
        for old in _checkpoints(folder)[:-keep]:
            if _step_of(old) != best:
                _remove(old)
    return final


def _write(partial: Path, contents: Contents, state: Mapping[str, Any]) -> None:
    """Write all files of a checkpoint, and sync them to the disk."""
    for name, tensors in contents.items():
        tick()
        try:
            groups = (enumerate(group.items()) for group in by_memory(tensors))  # shared memory must be cloned
            apart = {k: v.clone() if number else v for group in groups for number, (k, v) in group}
            save_file(apart, partial / name)
        except SafetensorError as error:  # safetensors wraps the system's errors too
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
    manifest = {
        "format": FORMAT,
        "checksums": {name: sha256(partial / name) for name in contents},
        "state": dict(state),
    }
    manifest = json.loads(json.dumps(manifest))  # as it will be read: all keys as text
    (partial / MANIFEST).write_text(json.dumps({**manifest, "own_checksum": own_checksum(manifest)}, indent=1))
    for path in (*partial.iterdir(), partial):
        flush(path)


def find_checkpoint(path: str | Path, which: str | None = _LATEST) -> Checkpoint:
    """Return the verified checkpoint at `path`: a run's folder, its `checkpoints` folder, or one checkpoint.

    `which`: `latest` or `best` of a run; None: the best if there is one, else the latest. Raises CheckpointError if
    there is none or a file is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: nothing there; give a run's folder or a checkpoint")
    for candidate in (path / "checkpoints", path):
        if (candidate / _LATEST).is_file():
            which = which or (BEST if (candidate / BEST).is_file() else _LATEST)
            if not (candidate / which).is_file():
                raise CheckpointError(f"{path} keeps no {which} checkpoint: {_NO_BEST}")
            with (candidate / which).open(errors="replace") as file:
                name = file.read(100).strip()
            if not _NAME.fullmatch(name):
                raise CheckpointError(
                    f"{candidate / which} holds '{name[:40]}', which is no checkpoint's name; give one checkpoint's "
                    "folder"
                )
            return verified(candidate / name)
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"no checkpoint at {path}: neither checkpoints/{_LATEST} nor {MANIFEST} is in it; give a run's folder or "
            "a checkpoint"
        )
    if which not in (None, _LATEST):
        raise CheckpointError(f"{path} is one checkpoint, not a run with a {which} one; give the run's folder")
    return verified(path)


def checkpoint_files(checkpoint: Checkpoint) -> list[Path]:
    """Return every file of a checkpoint, and the file `latest` that names it."""
    return [*files_below(checkpoint.path), checkpoint.path.parent / _LATEST]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run; None if there is none. Leftovers of a crash are ignored.

    Damaged ones are skipped, with a line in `passed_over`. Raises CheckpointError if checkpoints exist but none is
    whole, and for a whole one of another version or program: resuming from an older one would lose it.
    """
    faults: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            return replace(verified(path), passed_over=tuple(faults))
        except DamagedCheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole ({faults[0]}); give another run.output, or remove them to start anew"
        )
    return None


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in `folder`, whole or not; None if there is none."""
    paths = _checkpoints(folder)
    return _step_of(paths[-1]) if paths else None


def rewind(folder: Path, step: int, best: int | None) -> None:
    """Make the folder that of a run after `step`: delete leftovers of interrupted saves, and later checkpoints, which a
    resumed run found damaged; let `latest` and `best` (the step `best`, if any) name what is left."""
    for path in folder.glob(f"{_PARTIAL}*"):
        delete(path)
    paths = _checkpoints(folder)
    kept = [path for path in paths if _step_of(path) <= step]
    if kept:
        write_whole(folder / _LATEST, kept[-1].name + "\n")
    for path in paths[len(kept) :]:
        _remove(path)
    if best is not None:
        write_whole(folder / BEST, name_of(best) + "\n")
    else:
        (folder / BEST).unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted((p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()), key=_step_of)


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Delete a checkpoint after renaming it: a part of it never has the name."""
    if path.exists() or path.is_symlink():
        going = path.with_name(f"{_PARTIAL}old-{path.name}")
        delete(going)
        os.replace(path, going)
        delete(going)
