"""Manifests that are changed and get right checksums again: somebody can write them, and no run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiledseg.checkpoint.check import own_checksum, sha256

Manifest = dict[str, Any]


def seal(step: Path, change: Callable[[Manifest], object]) -> None:
    """Change the manifest, and give it the checksums of all as it is then."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest.pop("own_checksum", None)
    manifest["checksums"] = {file.name: sha256(file) for file in sorted(step.glob("*.safetensors"))}
    change(manifest)
    (step / "manifest.json").write_text(json.dumps({**manifest, "own_checksum": own_checksum(manifest)}))


CHANGES: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "step-of-another-folder": (lambda m: m["state"].update(step=7), "state.step 7"),
    "network-unknown-key": (lambda m: m["state"]["network"].update(colour=1), "colour"),
    "network-impossible": (lambda m: m["state"]["network"].update(levels=0), "model.levels is 0"),
    "network-a-list": (lambda m: m["state"].update(network=[3]), "is no checkpoint of this program"),
    "config-unknown-key": (lambda m: m["state"]["config"]["train"].update(colour=1), "colour"),
    "config-null": (lambda m: m["state"].update(config=None), "is no checkpoint of this program"),
    "position-gone": (lambda m: m["state"].pop("position"), "'position'"),
    "state-gone": (lambda m: m.pop("state"), "is no checkpoint of this program"),
    "state-a-list": (lambda m: m.update(state=[]), "is no checkpoint of this program"),
    "later-format": (lambda m: m.update(format=2), "checkpoint format '2', this program reads 1; use its own version"),
}
