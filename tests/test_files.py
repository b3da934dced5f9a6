"""Which paths are no regular files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tiledseg.system.files import irregular_kind


def test_regular_and_absent_files_are_of_no_irregular_kind(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert [irregular_kind(tmp_path / name) for name in ("a", "link", "absent")] == [None] * 3


def test_each_irregular_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    os.mkfifo("fifo")
    Path("link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        kinds = [irregular_kind(name) for name in (".", "fifo", "link", "sock", "/dev/null")]
    assert kinds == ["a folder", "a FIFO", "a FIFO", "a socket", "a character device"]
