"""Kinds of paths, files that are replaced whole, claims of outputs and of a run's folder, and limits of open files."""

import errno
import fcntl
import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.answers import refuse
from tests.comm.launching import run_job
from tests.crash.runs import Material
from tests.small_files import write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.errors import OutputError
from tiledseg.execution.progress import StepProgress
from tiledseg.system.files import irregular_kind, replacing
from tiledseg.system.outputs import unfinished
from tiledseg.system.run_lock import check_free, hold
from tiledseg.tile import main as tile


def test_each_irregular_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    os.mkfifo("fifo")
    Path("link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        Path("file").write_text("x")
        kinds = [irregular_kind(name) for name in (".", "fifo", "link", "sock", "/dev/null", "file", "absent")]
    assert kinds == ["a folder", "a FIFO", "a FIFO", "a socket", "a character device", None, None]


def test_a_file_that_is_replaced_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with suppress(ZeroDivisionError), replacing(path) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_two_stores_at_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first is cut; the first is not published over a store that came meanwhile."""
    write_raster(tmp_path / "a.tif", np.random.default_rng(0).integers(0, 255, (3, 64, 64)).astype(np.uint8))
    store = tmp_path / "t.h5"
    words = ["--images", str(tmp_path / "a.tif"), "--grid", "2", "--levels", "1", "--output", str(store)]
    with unfinished(store):
        refuse(lambda: tile(words), "another job is writing it too")
    assert not store.exists()
    progress = StepProgress.advance
    monkeypatch.setattr(StepProgress, "advance", lambda *words: (progress(*words), store.write_bytes(b"other")))
    refuse(lambda: tile(words), "another job is writing it too")
    assert store.read_bytes() == b"other"


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another failure is refused: EACCES may mean a lock that another process holds."""

    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", failing)
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
        with hold(tmp_path) as warning:
            assert warning is not None
            assert f"{tmp_path} cannot be locked ({os.strerror(number)}), so nothing stops" in warning
    monkeypatch.setattr(os, "pread", failing)
    for number, words in {errno.EACCES: "in use by another process", errno.EIO: "cannot lock .*run.lock: {}"}.items():
        with pytest.raises(OutputError, match=words.format(os.strerror(number))), hold(tmp_path):
            pass


def test_a_lock_is_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former holder removes its file after this one has opened it. A link is not followed."""
    path, flock = tmp_path / "run.lock", fcntl.flock
    path.touch()
    left = [path]

    def late(*words: Any) -> None:
        while left:
            left.pop().unlink()
        flock(*words)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold(tmp_path), pytest.raises(OutputError, match="is in use by process"):
        check_free(tmp_path)
    assert not path.exists()
    (tmp_path / "mine").write_text("mine")
    path.symlink_to("mine")
    with pytest.raises(OutputError, match="cannot write into"), hold(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_too_few_are_refused_and_a_low_limit_is_raised(tmp_path: Path) -> None:
    """With 8 or 12, a run ended with words about one of its images, its folder and a checkpoint written."""
    material, folder = Material.make(tmp_path), tmp_path / "run"
    train = f"ulimit -S -n 12; ulimit -H -n $0; exec {sys.executable} -m tiledseg.train"
    train += f" {shlex.join(material.train_command(folder)[1:])}"
    done = run_job(["sh", "-c", train, "12"])
    assert (done.code, done.errors) == (
        2,
        ["error: no more than 12 files may be open here, 64 are needed; raise it (ulimit -n)"],
    )
    assert not folder.exists()
    assert run_job(["sh", "-c", train, "64"]).code == 0
    assert find_checkpoint(folder).saved.step == 12
