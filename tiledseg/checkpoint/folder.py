"""Checkpoints: safetensors for tensors, JSON for the rest, written atomically.

A checkpoint is a folder `step-XXXXXX` with `model.safetensors`, `optimizer.safetensors` and `manifest.json`, which has
the SHA-256 of every file (and of its own content), the configuration, the position and the facts that prediction needs.
It is written under a temporary name, synced to the disk and renamed; the file `latest` then names it. Loading reads
only numbers and text: no code in a checkpoint can run.

A run resumes from an older checkpoint if the newest is damaged (a file truncated, changed, missing). A record with
right checksums that does not fit the model is another program's or a later version's, and is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from tiledseg.checkpoint.saved_state import SavedState, parse_state
from tiledseg.comm.doing import tick, ticking
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.memory.device import asked_back
from tiledseg.models.frozen import by_memory
from tiledseg.system.files import delete, flush, irregular_kind, write_whole, writing
from tiledseg.system.outputs import files_below

FORMAT = 1
MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
AVERAGE = "average.safetensors"  # averaged weights, if the manifest has the checksum
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
        for step, old in list(_checkpoints(folder).items())[:-keep]:
            if step != best:
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
    for path in ticking((*partial.iterdir(), partial)):
        flush(path)
    tick()


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files differ from those that were written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their checksums. `saved`: its record. `passed_over`: a line for each newer
    checkpoint that was damaged. `averages`: it has averaged weights."""

    path: Path
    saved: SavedState
    passed_over: tuple[str, ...] = ()
    averages: bool = False


def verified(path: Path) -> Checkpoint:
    """Return the checkpoint in the folder `path`. Raises CheckpointError if this version cannot use it, and
    DamagedCheckpointError if a file is not the one that was written."""
    manifest = _read_manifest(path)
    try:
        saved = parse_state(manifest["state"])
        checksums, averages = manifest["checksums"], AVERAGE in manifest["checksums"]
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of this program, though its checksums are right: {MANIFEST}: "
            f"{' '.join(str(error).split())[:200]}; use another one, or the version that wrote it"
        ) from None
    name = path.name.removeprefix("step-")  # resuming counts by the folder's name
    if path.name != name and name.isdecimal() and int(name) != saved.step:
        raise CheckpointError(
            f"{path} names step {name}, but its {MANIFEST} holds step {saved.step}; give the folder its former name"
        )
    for file in (MODEL, OPTIMIZER, *([AVERAGE] if averages else [])):
        kind, fault = irregular_kind(path / file), None
        if not (path / file).exists():
            fault = "is missing"
        elif kind is not None:
            fault = f"is {kind}"
        elif sha256(path / file) != checksums.get(file):
            fault = "does not match its checksum"
        if fault:
            raise DamagedCheckpointError(f"{path} is damaged: {file} {fault}; use an older checkpoint")
    return Checkpoint(path, saved, averages=averages)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after a check of its own checksum."""
    file, damaged = path / MANIFEST, f"{path} is no whole checkpoint: {MANIFEST}"
    try:
        if kind := irregular_kind(file):
            raise ValueError(f"it is {kind}")
        manifest: dict[str, Any] = json.loads(file.read_text())
        version, own = manifest.get("format"), manifest.pop("own_checksum", None)
        if version is None:
            raise ValueError("it states no format")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DamagedCheckpointError(f"{damaged} cannot be read ({reason}); use an older checkpoint") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {str(version)[:60]!r}, this program reads {FORMAT}; use its own version"
        )
    if own != own_checksum(manifest):
        raise DamagedCheckpointError(f"{damaged} does not match its checksum; use an older checkpoint")
    return manifest


def own_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest's content, which does not depend on its layout as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file; each MiB counts as progress."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            tick()
            digest.update(chunk)
    return digest.hexdigest()


def find_checkpoint(path: str | Path, which: str | None = _LATEST) -> Checkpoint:
    """Return the verified checkpoint at `path`: a run's folder, its `checkpoints` folder, or one checkpoint.

    `which`: `latest` or `best` of a run; None: the best if there is one, else the latest. Raises CheckpointError if
    there is none or a file is damaged.
    """
    path = Path(path)
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
    for path in reversed(_checkpoints(folder).values()):
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
    return max(_checkpoints(folder), default=None)


def rewind(folder: Path, step: int, best: int | None) -> None:
    """Make the folder that of a run after `step`: delete leftovers of interrupted saves, and later checkpoints, which a
    resumed run found damaged; let `latest` and `best` (the step `best`, if any) name what is left."""
    for path in folder.glob(f"{_PARTIAL}*"):
        delete(path)
    paths = _checkpoints(folder)
    kept = [each for each in paths if each <= step]
    if kept:
        write_whole(folder / _LATEST, paths[kept[-1]].name + "\n")
    for later in list(paths)[len(kept) :]:
        _remove(paths[later])
    if best is not None:
        write_whole(folder / BEST, name_of(best) + "\n")
    else:
        (folder / BEST).unlink(missing_ok=True)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by their steps, oldest first."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def _remove(path: Path) -> None:
    """Delete a checkpoint after renaming it: a part of it never has the name."""
    if path.exists() or path.is_symlink():
        going = path.with_name(f"{_PARTIAL}old-{path.name}")
        delete(going)
        os.replace(path, going)
        delete(going)
