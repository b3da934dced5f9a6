"""Checkpoints that are written while training goes on: those of a run that waits for each, to the last bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import Material, lines, train
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.system.writing import write_error
from tiledseg.training import saving
from tiledseg.training.saving import Saver

SHORT = ("--train.epochs", "2", "--train.ema", "0.9", "--run.panels", "0")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("saving"))


def checkpoints(folder: Path) -> dict[str, bytes]:
    root = folder / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def slowed(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """`before()` happens in the writing thread, before a checkpoint is written."""
    save = saving.save_checkpoint
    monkeypatch.setattr(saving, "save_checkpoint", lambda *arguments: (before(), save(*arguments))[1])


def test_training_goes_on_and_a_failure_is_met_at_the_next_step(
    material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = material.root / "fails"
    gate, writers = threading.Event(), []

    def fail_at_the_second() -> None:
        writers.append(threading.current_thread())
        if len(writers) == 2:
            gate.wait(100)
            raise write_error("step-000004", OSError(28, ""))

    save = saving.save_checkpoint
    monkeypatch.setattr(saving, "save_checkpoint", lambda *a: (fail_at_the_second(), save(*a))[1])
    check = Saver.check
    monkeypatch.setattr(Saver, "check", lambda saver: (len(lines(folder)) >= 5 and gate.set(), check(saver))[1])
    assert train(material, folder, *SHORT, "--train.checkpoint_every", "2", "--train.validate_every", "9") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert 5 <= len(lines(folder)) <= 6, "the run went on beside it, and not for long after"
    assert threading.main_thread() not in writers
    assert find_checkpoint(folder).saved.step == 2
