"""Checkpoints whose checksums are right and whose content is no run's: one line, and no older one in their place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.resealed import ALL, IRREGULAR, MANIFESTS, STATES, TENSORS, Change, in_manifest, reseal
from tests.crash.runs import Material
from tiledseg.checkpoint.folder import find_checkpoint, newest_checkpoint
from tiledseg.errors import CheckpointError
from tiledseg.train import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of three steps: after the second and at its end."""
    material = Material.make(tmp_path_factory.mktemp("resealed"))
    folder = material.root / "run"
    options = ("--train.epochs", "1", "--train.precision", "fp32")
    assert main([*material.train_command(folder)[1:], *options]) == 0
    return folder / "checkpoints"


def broken(whole: Path, tmp_path: Path, change: Change) -> Path:
    folder = Path(shutil.copytree(whole, tmp_path / "checkpoints"))
    change(folder / "step-000003")
    return folder


@pytest.mark.parametrize(("name", "change", "words"), ALL, ids=[name for name, _, _ in ALL])
@pytest.mark.timeout(100)
def test_one_line_says_what_is_wrong(whole: Path, tmp_path: Path, name: str, change: Change, words: str) -> None:
    """What somebody wrote there is not taken for damage, over which a run would go, and which it then removes."""
    folder = broken(whole, tmp_path, change)
    for path in (folder, folder / "step-000003"):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    if name.startswith("header") or (name, change, words) in IRREGULAR:
        found = newest_checkpoint(folder)
        assert found is not None
        assert found.saved.step == 2
        assert len(found.passed_over) == 1
        assert words in found.passed_over[0]
    else:
        with pytest.raises(CheckpointError, match="step-000003"):
            newest_checkpoint(folder)


def test_resealing_alone_changes_nothing(whole: Path, tmp_path: Path) -> None:
    """Else the edits above would be refused for the seal."""
    folder = broken(whole, tmp_path, reseal)
    assert find_checkpoint(folder).state == find_checkpoint(whole).state
    assert min(map(len, (STATES, MANIFESTS, TENSORS))) > 10


def test_a_checkpoint_of_a_later_format_is_not_passed_over(whole: Path, tmp_path: Path) -> None:
    """A run that went on before it, by an older program, would remove it."""
    folder = broken(whole, tmp_path, in_manifest(lambda manifest: manifest.update(format=2)))
    with pytest.raises(CheckpointError, match="format 2, this program reads 1"):
        newest_checkpoint(folder)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
@pytest.mark.timeout(100)
def test_an_odd_latest(whole: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "checkpoints"))
    latest = folder / "latest"
    latest.unlink()
    if kind == "folder":
        latest.mkdir()
    elif kind == "fifo":
        os.mkfifo(latest)
    else:
        latest.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        find_checkpoint(folder)
