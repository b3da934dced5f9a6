"""A disk that takes no more, or a limit of a file's size: one line, exit 1, the last good checkpoint kept. A run that
moves tensors to a file and ends early leaves no file, thread or descriptor."""

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comm.launching import ROOT
from tests.crash.runs import Material, after_step
from tiledseg import plan, scene, tile, train
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.memory import offload
from tiledseg.planning.run import memory as planned
from tiledseg.training.run_journal import Journal


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False, cwd=ROOT)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


Limited = Callable[..., tuple[int, str]]


@pytest.fixture
def limited(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Limited:
    """Commands in this process, whose files may have so many bytes."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # no half bytecode for others

    def run(size: int, main: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
        """Return the exit code and standard error."""
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        capfd.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
        try:
            code = main(list(arguments))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        return code, capfd.readouterr().err

    return run


def check_one_line(done: tuple[int, str], *words: str) -> None:
    code, err = done
    assert code == 1, err
    assert err.count("\n") == 1, err
    assert err.startswith("error: cannot write ")
    assert all(word in err for word in words), err


def test_a_checkpoint_that_does_not_fit(material: Material, limited: Limited) -> None:
    folder = material.root / "limited"
    done = limited(3000, train.main, *material.train_command(folder)[1:])
    check_one_line(done, "checkpoints/step-000002", "File too large", "ulimit -f")
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "run.lock").exists()


def test_a_panel_that_does_not_fit_leaves_the_run_resumable(material: Material, limited: Limited) -> None:
    folder = material.root / "no-panel"
    done = limited(12000, train.main, *material.train_command(folder)[1:])
    check_one_line(done, "validation/step-000003.png", "File too large")
    assert find_checkpoint(folder).saved.step == 2
    assert not list(folder.rglob(".*"))


def test_a_store_a_plot_and_a_scene_that_do_not_fit(material: Material, tmp_path: Path, limited: Limited) -> None:
    """`tile` died of SIGSEGV and left a file behind."""
    store = ["--config", str(material.root / "run.yaml"), "--output", str(tmp_path / "tiles.h5")]
    rasters = ["--size", "99", "99", "--image", str(tmp_path / "a.tif"), "--labels", str(tmp_path / "b.tif")]
    for main, arguments, name in ((tile.main, store, "tiles.h5"), (scene.main, rasters, "a.tif")):
        code, err = limited(2000, main, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert name in err
        assert "files may have 2000 here; raise the limit (ulimit -f)" in err
    plot = str(tmp_path / "plan.png")
    check_one_line(limited(2000, plan.main, "--size", "1000", "--plot", plot), "plan.png", "File too large")
    for size in (1_048_700, 1_050_000):  # room for its pixels, not for all that describes them
        code, err = limited(size, scene.main, *rasters)
        assert (code, err.splitlines()[-1].startswith(f"error: cannot write {tmp_path}/a.tif: ")) == (1, True), err
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_ends_the_job_of_two_ranks_which_goes_on_once_there_is_room(
    material: Material, disk: Path
) -> None:
    done = material.train(2, disk / "run")
    assert done.code == 1
    assert len(done.errors) == 1, done.err
    assert "cannot write" in done.errors[0]
    assert "No space left on device" in done.errors[0]
    assert "Traceback" not in done.err
    assert find_checkpoint(disk / "run").saved.step >= 2
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    assert train.main(material.train_command(disk / "run")[1:]) == 0
    assert find_checkpoint(disk / "run").saved.step == 12


def test_a_folder_that_goes_away_ends_the_run_in_one_line(
    material: Material, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's thread printed a traceback before the line."""
    folder, write_line = material.root / "going", Journal.step

    def move_away_first(journal: Journal, line: dict[str, Any]) -> None:
        if line["step"] == 6:
            folder.rename(folder.with_name("gone"))
        write_line(journal, line)

    monkeypatch.setattr(Journal, "step", move_away_first)
    capfd.readouterr()
    assert train.main(material.train_command(folder)[1:]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: cannot write ")
    assert err.count("\n") == 1, err
    assert find_checkpoint(folder.with_name("gone")).saved.step >= 2


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


def offloaded(material: Material, folder: Path, store: Path) -> int:
    asked = ["--memory.offload", "all", "--memory.store", str(store), "--run.verbosity", "1"]
    return train.main([*material.train_command(folder)[1:], *asked])


def test_a_full_disk_is_one_line(
    material: Material, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    assert offloaded(material, tmp_path / "full", store) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert f"the store in {store}: full of " in lines[0]
    assert "No space left on device" in lines[0]


def test_a_signal_ends_it_with_a_checkpoint_and_the_lines_of_the_run(
    material: Material, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_step(monkeypatch, 1)
    assert offloaded(material, tmp_path / "stopped", store) == 75
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*")] == ["step-000002"]
    told = "".join(capsys.readouterr())
    assert f" MiB go to a file in {store}, of which " in told
    assert f"MiB went to a file in {store}" in told
