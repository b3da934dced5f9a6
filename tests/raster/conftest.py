"""A port of this machine on which nobody answers, and which counts who asks; and a folder to run in."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


class Listener:
    """A port on which nobody answers. The kernel takes connections by itself, whatever this process waits for."""

    def __init__(self, held: socket.socket) -> None:
        held.bind(("127.0.0.1", 0))
        held.listen(99)
        held.setblocking(False)
        self._held = held
        self.address = f"127.0.0.1:{held.getsockname()[1]}"

    def calls(self) -> int:
        """Connections since the last call."""
        count = 0
        with suppress(BlockingIOError):
            while True:
                self._held.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for name, value in {"no_proxy": "*", "NO_PROXY": "*", "GDAL_HTTP_TIMEOUT": "1", "GDAL_HTTP_MAX_RETRY": "0"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as held:
        yield Listener(held)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
