"""Checkpoints that are written while training goes on: those of a run that waits for each, to the last bit."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import Material, lines, train
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.commands.options import parse_config
from tiledseg.system.writing import write_error
from tiledseg.training import saving, trainer
from tiledseg.training.preparing.preparation import prepare
from tiledseg.training.saving import Saver
from tiledseg.training.steps.step import Stepper

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


def test_the_bits_of_a_save_at_once(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written only once the next step is done, and holds what the run held before it."""
    folder, same = material.root / "same", material.root / "same"
    monkeypatch.setattr(trainer, "why_waiting", lambda *given: "no room")
    assert train(material, folder, *SHORT) == 0
    at_once, its_lines = checkpoints(folder), lines(folder)
    folder.rename(material.root / "at-once")
    monkeypatch.undo()

    steps, run = [0], Stepper.run

    def counted(*arguments: Any) -> Any:
        result = run(*arguments)
        steps[0] += 1
        return result

    def await_a_step() -> None:
        seen, end = steps[0], time.monotonic() + 100
        while seen == steps[0] < 6 and time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(Stepper, "run", counted)
    slowed(monkeypatch, await_a_step)
    assert train(material, same, *SHORT) == 0
    assert lines(same) == its_lines
    assert checkpoints(same) == at_once
    assert len(at_once) == 3 * 4 + 1, "steps 2, 4 and 6, and which is the latest"


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


def test_a_copy_that_does_not_fit_is_said_and_not_made(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    """The budget is what a step needs."""
    folder = material.root / "no-room"
    command = [*material.train_command(folder)[1:], *SHORT, "--run.verbosity", "2"]
    plan = prepare(parse_config(command, "train", ""), 2**34, 1).plan
    assert train(material, folder, *command[4:], "--memory.budget", f"{plan.memory + 1000}B") == 0
    said = capsys.readouterr().err
    assert "warning: training waits while a checkpoint is written: a copy of it takes 0.0 MiB" in said
    assert json.loads((folder / "summary.json").read_text())["checkpoint_copy_bytes"] is None
    assert find_checkpoint(folder).saved.step == 6
