"""Checkpoints: safetensors for tensors, JSON for the rest, written whole or not at all.

A checkpoint is a folder `step-XXXXXX` with `model.safetensors`, `optimizer.safetensors` and `manifest.json`, which
holds every file's SHA-256, the configuration, the position and what prediction needs. It is written under a temporary
name, flushed to the disk and renamed; the file `latest` then names it. Loading reads numbers and text only: nothing in
a checkpoint can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from tiledseg.errors import CheckpointError

FORMAT = 1
_MODEL, _OPTIMIZER, _MANIFEST, _LATEST = "model.safetensors", "optimizer.safetensors", "manifest.json", "latest"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been found whole.

    `state` is the JSON part: configuration, step, epoch, position, normalisation, classes.
    """

    path: Path
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep: int
) -> Path:
    """Write `folder`/step-XXXXXX and point `latest` at it; then drop all but the newest `keep`. One rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file({k: v.detach().contiguous().cpu() for k, v in network.state_dict().items()}, partial / _MODEL)
    tensors, groups = _flatten_optimizer(optimizer)
    save_file(tensors, partial / _OPTIMIZER)
    manifest = {
        "format": FORMAT,
        "step": step,
        "checksums": {name: _sha256(partial / name) for name in (_MODEL, _OPTIMIZER)},
        "optimizer_groups": groups,
        "state": dict(state),
    }
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in partial.iterdir():
        _flush(path)
    if final.exists():  # the same step again, by a resumed run: the content is equal, the old one may go
        shutil.rmtree(final)
    os.replace(partial, final)
    _write_latest(folder, final.name)
    _flush(folder)
    for old in _found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def find_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a run's folder, its `checkpoints` folder, or one checkpoint; files are verified.

    Raises CheckpointError where there is none or a file is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: nothing there; give a run's folder or a checkpoint")
    for candidate in (path / "checkpoints", path):
        if (candidate / _LATEST).is_file():
            return _verified(candidate / (candidate / _LATEST).read_text().strip())
    return _verified(path)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, for resuming; None where there is none. Leftovers of a crash are ignored.

    Raises CheckpointError where checkpoints exist but none is whole.
    """
    faults = []
    for path in reversed(_found(folder)):
        try:
            return _verified(path)
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole ({faults[0]}); set train.resume to never to start anew"
        )
    return None


def clean_leftovers(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def load_network(checkpoint: Checkpoint, network: nn.Module) -> None:
    """Fill `network` with the checkpoint's weights, bit for bit; raises CheckpointError where they do not fit."""
    saved = load_file(checkpoint.path / _MODEL)
    own = network.state_dict()
    wrong = sorted(saved.keys() ^ own.keys()) or sorted(k for k in own if own[k].shape != saved[k].shape)
    if wrong:
        here = tuple(own[wrong[0]].shape) if wrong[0] in own else "absent"
        there = tuple(saved[wrong[0]].shape) if wrong[0] in saved else "absent"
        raise CheckpointError(
            f"{checkpoint.path} is of another model: '{wrong[0]}' is {there} there and {here} in this network; "
            "use the configuration it was trained with"
        )
    network.load_state_dict(saved)


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Fill `optimizer` with the checkpoint's state; raises CheckpointError where it is of another optimizer."""
    groups = json.loads((checkpoint.path / _MANIFEST).read_text())["optimizer_groups"]
    own = optimizer.state_dict()["param_groups"]
    if [sorted(g) for g in groups] != [sorted(g) for g in own]:
        raise CheckpointError(
            f"{checkpoint.path} holds the state of another optimizer: keys {sorted(groups[0])} there, "
            f"{sorted(own[0])} here; use the same optimizer.name"
        )
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(checkpoint.path / _OPTIMIZER).items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    # Hyperparameters are this run's: only what the optimizer has gathered comes from the checkpoint.
    optimizer.load_state_dict({"state": state, "param_groups": own})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if value.shape == parameter.shape:  # the parameter's strides: the fused update wants them alike
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    whole = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": torch.as_tensor(value).detach().contiguous().cpu()
        for index, entries in whole["state"].items()
        for name, value in entries.items()
        if value is not None
    }
    return tensors, whole["param_groups"]


def _found(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), key=lambda p: (len(p.name), p.name))


def _verified(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        found, checksums, state = manifest["format"], manifest["checksums"], manifest["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: its manifest.json cannot be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {found}, this program reads {FORMAT}; use its own version")
    for name in (_MODEL, _OPTIMIZER):
        if not (path / name).is_file() or _sha256(path / name) != checksums.get(name):
            raise CheckpointError(f"{path} is damaged: {name} does not match its checksum; use an older checkpoint")
    try:
        load_file(path / _MODEL)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return Checkpoint(path, state)


def _write_latest(folder: Path, name: str) -> None:
    partial = folder / f".{_LATEST}"
    partial.write_text(name + "\n")
    _flush(partial)
    os.replace(partial, folder / _LATEST)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
