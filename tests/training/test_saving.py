"""Checkpoints that are written while training goes on: those of a run that waits for each, to the last bit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.checkpoint.saved import make_network, state_of
from tests.checkpoint.saved import train as steps
from tests.crash.runs import Material, lines, train
from tiledseg.checkpoint.folder import contents_of, find_checkpoint
from tiledseg.comm.mesh import serial_axes
from tiledseg.config.run import OptimizerConfig
from tiledseg.system.files import write_error
from tiledseg.training import saving
from tiledseg.training.optimizer import AveragedWeights, build_optimizer
from tiledseg.training.saving import Saver

SHORT = ("--train.epochs", "2", "--train.ema", "0.9")


def test_a_checkpoint_has_the_bits_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written later, it is byte for byte what a save at once writes. A save waits for the one before."""
    network, gate, save = make_network(), threading.Event(), saving.save_checkpoint
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    average = AveragedWeights(network, 0.5)
    saver = Saver(tmp_path / "later", 9, serial_axes())
    monkeypatch.setattr(saving, "save_checkpoint", lambda *arguments: (gate.wait(100), save(*arguments)))
    for step in (2, 5):
        steps(network, optimizer, 2 if step == 2 else 3)
        average.update(step)
        save(tmp_path / "at-once", contents_of(network, optimizer, average.tensors), state_of(step), 9)
        if step == 5:
            threading.Timer(0.1, gate.set).start()
        assert saver.save(network, optimizer, average, state_of(step), None)
        saver.check()  # nothing has failed, and nobody is waited for
    saver.wait()
    files = {path.relative_to(tmp_path / "at-once") for path in (tmp_path / "at-once").rglob("*") if path.is_file()}
    assert len(files) == 2 * 4 + 1
    assert all((tmp_path / "later" / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes() for name in files)


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
