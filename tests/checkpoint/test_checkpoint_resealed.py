"""Checkpoints whose checksums are right and whose content does not fit, and files that are no files: one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.resealed import seal
from tests.checkpoint.saved import make_network, save
from tiledseg.checkpoint.check import MODEL, OPTIMIZER
from tiledseg.checkpoint.folder import find_checkpoint, newest_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The checkpoints after two and three steps."""
    save(tmp_path / "checkpoints", 2)
    save(tmp_path / "checkpoints", 3)
    return tmp_path / "checkpoints"


def test_tensors_that_do_not_fit_are_refused_where_they_are_loaded(checkpoints: Path) -> None:
    tensors = load_file(checkpoints / "step-000003" / MODEL)
    name = min(tensors)
    tensors.pop(name)
    save_file(tensors, checkpoints / "step-000003" / MODEL)
    seal(checkpoints / "step-000003", lambda manifest: None)
    with pytest.raises(CheckpointError, match=f"'{name}' is absent there"):
        load_network(find_checkpoint(checkpoints), make_network())


def pipe(path: Path) -> None:
    """A FIFO with nobody at its other end."""
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest-a-fifo": (lambda step: pipe(step / "manifest.json"), "manifest.json is a FIFO"),
    "weights-a-fifo": (lambda step: pipe(step / MODEL), f"{MODEL} is a FIFO"),
    "weights-a-folder": (lambda step: ((step / MODEL).unlink(), (step / MODEL).mkdir()), f"{MODEL} is a folder"),
    "optimizer-to-nowhere": (lambda step: link(step / OPTIMIZER, "nowhere"), f"{OPTIMIZER} is missing"),
    "weights-to-a-device": (lambda step: link(step / MODEL, "/dev/zero"), f"{MODEL} is a character device"),
    "manifest-to-itself": (lambda step: link(step / "manifest.json", "manifest.json"), "manifest.json"),
    "manifest-nested": (lambda step: (step / "manifest.json").write_text("[" * 100_000), "manifest.json"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.timeout(120)
def test_a_file_that_is_none_is_damage(checkpoints: Path, name: str) -> None:
    change, words = ODD[name]
    change(checkpoints / "step-000003")
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(checkpoints)
    older = newest_checkpoint(checkpoints)
    assert older is not None
    assert older.saved.step == 2
    assert words in older.passed_over[0]
