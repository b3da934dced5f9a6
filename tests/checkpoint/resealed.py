"""Manifests that are changed and get right checksums again: somebody can write them, and no run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiledseg.checkpoint.folder import own_checksum, sha256

Manifest = dict[str, Any]


def seal(step: Path, change: Callable[[Manifest], object]) -> None:
    """Change the manifest, and give it the checksums of all as it is then."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest.pop("own_checksum", None)
    manifest["checksums"] = {file.name: sha256(file) for file in sorted(step.glob("*.safetensors"))}
    change(manifest)
    (step / "manifest.json").write_text(json.dumps({**manifest, "own_checksum": own_checksum(manifest)}))
