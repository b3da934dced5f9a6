"""One run a folder: the second is refused and told who is there; the lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.launching import clean_environment
from tests.small_files import tree
from tiledseg.errors import OutputError
from tiledseg.system.run_lock import NAME, check_free, hold

HOLDER = "import sys, time, pathlib; from tiledseg.system.run_lock import hold\n"
HOLDER += "with hold(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"


def test_the_second_is_refused_by_name_and_writes_nothing(tmp_path: Path) -> None:
    with hold(tmp_path / "run") as warning:
        assert warning is None
        before = tree(tmp_path)
        for attempt in (lambda: check_free(tmp_path / "run"), hold(tmp_path / "run").__enter__):
            with pytest.raises(OutputError) as caught:
                attempt()
            for word in (f"process {os.getpid()} on ", " since 20", "another run.output", str(tmp_path / "run")):
                assert word in str(caught.value)
        assert tree(tmp_path) == before
    assert list((tmp_path / "run").iterdir()) == []
    check_free(tmp_path / "run")


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=f"in use by process {process.pid} on "):
            check_free(folder)
        process.send_signal(signal.SIGKILL)
    assert (folder / NAME).exists(), "the file stays, and locks nothing"
    check_free(folder)
    with hold(folder):
        assert str(os.getpid()) in (folder / NAME).read_text()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with hold(tmp_path) as warning:
        assert warning is not None
        assert "has no locks" in warning
