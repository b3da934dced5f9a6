"""A checkpoint that can be trusted to be one: its files against their checksums, its content against itself.

Damage (a file cut, flipped, gone) and content that no run writes are two things. A run goes on from an older checkpoint
past the first; the second was put there by somebody, and is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tiledseg.checkpoint.saved_state import SavedState, parse_state
from tiledseg.checkpoint.tensors import check_average, check_tensors
from tiledseg.checkpoint.typed_json import MalformedError, parse, quoted
from tiledseg.errors import CheckpointError
from tiledseg.records import dataclass
from tiledseg.system.files import irregular_kind

FORMAT = 1
MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
AVERAGE = "average.safetensors"  # of the weights: only where the manifest has its checksum


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been found whole, and its content to be that of a run.

    `state` is the JSON part as it lies there, `saved` the same with each value checked. `passed_over`: why newer ones
    were not taken, a line each; `averages`: whether it has an average of the weights.
    """

    path: Path
    state: dict[str, Any]
    saved: SavedState
    passed_over: tuple[str, ...] = ()
    averages: bool = False


@dataclass(frozen=True)
class _Manifest:
    format: int
    step: int
    checksums: dict[str, str]
    optimizer_groups: list[dict[str, Any]]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Group:
    """What is looked at of an optimizer's group: its options are those of the run that goes on."""

    params: list[int]


def verified(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; raises CheckpointError for what is wrong with it, DamagedCheckpointError
    where a file is not the one that was written."""
    content = _read_manifest(path)
    try:
        manifest = parse(_Manifest, content, "the manifest")
        saved = parse_state(manifest.state)
        for group in manifest.optimizer_groups:
            parse(_Group, {"params": group.get("params")}, "an optimizer group")
    except MalformedError as error:
        raise _refused(path, MANIFEST, error) from None
    _check_names(path, manifest)
    averages = AVERAGE in manifest.checksums
    names = (MODEL, OPTIMIZER, *([AVERAGE] if averages else []))
    tensors = {name: _read_tensors(path, name, manifest.checksums) for name in names}
    try:
        check_tensors(saved, manifest.optimizer_groups, tensors[MODEL], tensors[OPTIMIZER])
        if averages:
            check_average(tensors[AVERAGE], tensors[MODEL])
    except MalformedError as error:
        raise _refused(path, "its tensors", error) from None
    return Checkpoint(path, manifest.state, saved, averages=averages)


def _refused(path: Path, what: str, error: MalformedError) -> CheckpointError:
    return CheckpointError(
        f"{path} is no checkpoint of this program, though its checksums are right: {what}: {error}; use another one"
    )


def _check_names(path: Path, manifest: _Manifest) -> None:
    """The same step wherever it is named: resuming counts by the folder's name."""
    name, step = path.name.removeprefix("step-"), manifest.state["step"]
    named = int(name) if path.name.startswith("step-") and name.isdecimal() else step
    if not named == manifest.step == step:
        raise CheckpointError(
            f"{path} names step {named}, but its {MANIFEST} holds step {manifest.step} and state.step {step}; "
            "give the folder the name that it had"
        )


def _read_tensors(path: Path, name: str, checksums: Mapping[str, str]) -> dict[str, torch.Tensor]:
    fault = "is missing" if not (path / name).exists() else None
    kind = irregular_kind(path / name)
    if kind is not None:
        fault = f"is {kind}"
    if fault is None and sha256(path / name) != checksums.get(name):
        fault = "does not match its checksum"
    if fault is not None:
        raise DamagedCheckpointError(f"{path} is damaged: {name} {fault}; use an older checkpoint")
    try:
        return load_file(path / name)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedCheckpointError(f"{path} is damaged: {name} {reason}; use an older checkpoint") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, found whole."""
    file = path / MANIFEST
    kind = irregular_kind(file)
    if kind is not None:
        raise DamagedCheckpointError(f"{path} is no whole checkpoint: {MANIFEST} is {kind}; use an older checkpoint")
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DamagedCheckpointError(
            f"{path} is no whole checkpoint: {MANIFEST} cannot be read ({reason}); use an older checkpoint"
        ) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found is None:
        raise DamagedCheckpointError(f"{file} is no checkpoint's manifest: it states no format; use another checkpoint")
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {quoted(found)}, this program reads {FORMAT}; use its own version"
        )
    own = manifest.pop("own_checksum", None)
    if own != own_checksum(manifest):
        raise DamagedCheckpointError(
            f"{path} is damaged: {MANIFEST} does not match its checksum; use an older checkpoint"
        )
    return manifest


def own_checksum(manifest: Mapping[str, Any]) -> str:
    """Of the manifest's content, however it is laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Of a file, as text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
