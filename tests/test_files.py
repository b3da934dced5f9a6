"""Kinds of paths, and files that are replaced whole."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tiledseg.system.files import irregular_kind, replacing


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


def test_a_file_that_is_replaced_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_text("half")
            assert path.read_text() == "old"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
