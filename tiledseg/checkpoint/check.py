"""Verification of a checkpoint: its files against their checksums, its record against the model of it.

A run resumes from an older checkpoint if the newest is damaged (a file truncated, changed, missing). A record with
right checksums that does not fit the model is another program's or a later version's, and is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledseg.checkpoint.saved_state import SavedState, parse_state
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.system.files import irregular_kind

FORMAT = 1
MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
AVERAGE = "average.safetensors"  # averaged weights, if the manifest has the checksum


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
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version is None:
        raise DamagedCheckpointError(f"{file} is no checkpoint's manifest: it states no format; use another checkpoint")
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {str(version)[:60]!r}, this program reads {FORMAT}; use its own version"
        )
    own = manifest.pop("own_checksum", None)
    if own != own_checksum(manifest):
        raise DamagedCheckpointError(
            f"{path} is damaged: {MANIFEST} does not match its checksum; use an older checkpoint"
        )
    return manifest


def own_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest's content, which does not depend on its layout as text."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
