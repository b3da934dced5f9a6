"""Checkpoints: safetensors for tensors, JSON for the rest, written whole or not at all.

A checkpoint is a folder `step-XXXXXX` with `model.safetensors`, `optimizer.safetensors` and `manifest.json`, which
holds every file's SHA-256 (its own content's too), the configuration, the position and what prediction needs. It is
written under a temporary name, flushed to the disk and renamed; the file `latest` then names it. Loading reads numbers
and text only: nothing in a checkpoint can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
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
_NAME = re.compile(r"step-(\d{6,})")
_STATE_KEYS = ("config", "network", "normalization", "position", "sampling", "step")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been found whole.

    `state` is the JSON part: configuration, step, epoch, position, normalisation, classes.
    """

    path: Path
    state: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, on the CPU: weights and buffers by name, and of the optimizer `index.entry`, where
    parameters count as in the whole network; `groups` are the optimizer's options. With stages, a rank's own part."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]


def contents_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> Contents:
    """What this rank holds of a checkpoint; what is on the meta device is another stage's."""
    whole = optimizer.state_dict()
    entries = {
        f"{index}.{name}": torch.as_tensor(value).detach().contiguous().cpu()
        for index, entries in whole["state"].items()
        for name, value in entries.items()
        if value is not None
    }
    weights = {k: v.detach().contiguous().cpu() for k, v in network.state_dict().items() if not v.is_meta}
    return Contents(weights, entries, whole["param_groups"])


def save_checkpoint(folder: Path, step: int, contents: Contents, state: Mapping[str, Any], keep: int) -> Path:
    """Write `folder`/step-XXXXXX and point `latest` at it; then drop all but the newest `keep`. One rank calls it.

    The law: ended at any moment, it leaves every older checkpoint whole until the new one is. No checkpoint of a later
    step may be there (see `drop_later`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file(contents.weights, partial / _MODEL)
    save_file(contents.optimizer, partial / _OPTIMIZER)
    manifest = {
        "format": FORMAT,
        "step": step,
        "checksums": {name: _sha256(partial / name) for name in (_MODEL, _OPTIMIZER)},
        "optimizer_groups": contents.groups,
        "state": dict(state),
    }
    manifest = json.loads(json.dumps(manifest))  # as it will be read: text for the keys of every map
    (partial / _MANIFEST).write_text(json.dumps({**manifest, "own_checksum": _own_checksum(manifest)}, indent=1))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    _remove(final)  # a damaged one, over which a resumed run has gone back to an older one
    os.replace(partial, final)
    _write_latest(folder, final.name)
    _flush(folder)
    for old in _found(folder)[:-keep]:
        _remove(old)
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
            return _verified(candidate / _named_by(candidate / _LATEST))
    if not (path / _MANIFEST).exists():
        raise CheckpointError(
            f"no checkpoint at {path}: neither checkpoints/{_LATEST} nor {_MANIFEST} is in it; give a run's folder or "
            "a checkpoint"
        )
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
            f"no checkpoint in {folder} is whole ({faults[0]}); give another run.output, or remove them to start anew"
        )
    return None


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in `folder`, whole or not; None where there is none."""
    found = _found(folder)
    return _step_of(found[-1]) if found else None


def clean_leftovers(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def drop_later(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`: a run that goes on from `step` found them damaged and makes them anew."""
    kept = [path for path in _found(folder) if _step_of(path) <= step]
    if kept:
        _write_latest(folder, kept[-1].name)
    for path in _found(folder)[len(kept) :]:
        _remove(path)


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
    """Fill `optimizer` with the checkpoint's state; raises CheckpointError where it is of another optimizer.

    The state of parameters on the meta device, which another stage holds, is left out.
    """
    groups = json.loads((checkpoint.path / _MANIFEST).read_text())["optimizer_groups"]
    own = optimizer.state_dict()["param_groups"]
    there, here = (_describe_groups(g) for g in (groups, own))
    if there != here:
        raise CheckpointError(
            f"{checkpoint.path} holds the state of another optimizer: {there} there, {here} here; use the same "
            "optimizer.name"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(checkpoint.path / _OPTIMIZER).items():
        index, _, name = key.partition(".")
        if not parameters[int(index)].is_meta:
            state.setdefault(int(index), {})[name] = tensor
    # Hyperparameters are this run's: only what the optimizer has gathered comes from the checkpoint.
    optimizer.load_state_dict({"state": state, "param_groups": own})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if value.shape == parameter.shape:  # the parameter's strides: the fused update wants them alike
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """What must be alike for a state to fit: the parameters of each group and the names of its options."""
    return "; ".join(f"{len(g['params'])} parameters with {' '.join(sorted(g.keys() - {'params'}))}" for g in groups)


def _found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted((p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _named_by(latest: Path) -> str:
    name = latest.read_text(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{latest} holds '{name[:40]}', which is no checkpoint's name; give one checkpoint's folder"
        )
    return name


def _verified(path: Path) -> Checkpoint:
    manifest = _read_manifest(path)
    for name in (_MODEL, _OPTIMIZER):
        fault = "is missing" if not (path / name).is_file() else None
        if fault is None and _sha256(path / name) != manifest["checksums"][name]:
            fault = "does not match its checksum"
        if fault is not None:
            raise CheckpointError(f"{path} is damaged: {name} {fault}; use an older checkpoint")
        try:
            load_file(path / name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {name} {error}; use an older checkpoint") from error
    return Checkpoint(path, manifest["state"])


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, found whole."""
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{path} is no whole checkpoint: {_MANIFEST} cannot be read ({reason}); use an older checkpoint"
        ) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found is None:
        raise CheckpointError(f"{file} is no checkpoint's manifest: it states no format; use another checkpoint")
    if found != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {found}, this program reads {FORMAT}; use its own version")
    own = manifest.pop("own_checksum", None)
    missing = [key for key in _STATE_KEYS if key not in (manifest.get("state") or {})]
    if own != _own_checksum(manifest) or missing:
        raise CheckpointError(f"{path} is damaged: {_MANIFEST} does not match its checksum; use an older checkpoint")
    return manifest


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    """Of the manifest's content, however it is laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    """Remove a checkpoint, of which no part keeps the name meanwhile."""
    if path.exists():
        going = path.with_name(f"{_PARTIAL}old-{path.name}")
        shutil.rmtree(going, ignore_errors=True)
        os.replace(path, going)
        shutil.rmtree(going, ignore_errors=True)


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
