"""A run that moves tensors to a file and ends early: a full disk is one line, a signal writes a checkpoint, and neither
leaves a file, a thread or a descriptor."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.runs import Material, after_step
from tiledseg.memory import offload
from tiledseg.planning.run import memory as planned
from tiledseg.train import main


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing is left, by threads that have ended."""
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setattr(planned, "LEAST", 1)
    folder = tmp_path / "store"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []
    gc.collect()
    until = time.monotonic() + 60
    while any(thread.name.startswith(("store-", "memory-")) for thread in threading.enumerate()):
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.05)
    assert not any(str(folder) in os.readlink(f"/proc/self/fd/{number}") for number in _descriptors())


def _descriptors() -> list[str]:
    return [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]


def train(material: Material, folder: Path, store: Path) -> int:
    asked = ["--memory.offload", "all", "--memory.store", str(store), "--run.verbosity", "1"]
    return main([*material.train_command(folder)[1:], *asked])


def test_a_full_disk_is_one_line(
    material: Material, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    assert train(material, tmp_path / "full", store) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert f"the store in {store}: full of " in lines[0]
    assert "No space left on device" in lines[0]


def test_a_signal_ends_it_with_a_checkpoint_and_the_lines_of_the_run(
    material: Material, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_step(monkeypatch, 1)
    assert train(material, tmp_path / "stopped", store) == 75
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*")] == ["step-000002"]
    told = "".join(capsys.readouterr())
    assert f" MiB go to a file in {store}, of which " in told
    assert f"MiB went to a file in {store}" in told
