"""Stores for tests: on a disk, as they are used, and slow ones whose copies end at any time and in any order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from tiledseg.memory.disk.aligned import Bytes
from tiledseg.memory.disk.file_mover import FileMover
from tiledseg.memory.disk.file_store import FileStore
from tiledseg.memory.offload import Offload

ROOM = 1 << 28


class SlowStore(FileStore):
    """Each piece takes up to `most` seconds longer."""

    most = 0.0005

    def _write_piece(self, offset: int, piece: Bytes) -> None:
        time.sleep(random.Random(offset + len(piece)).uniform(0, self.most))
        super()._write_piece(offset, piece)

    def _read_piece(self, offset: int, piece: Bytes) -> None:
        time.sleep(random.Random(offset).uniform(0, self.most))
        super()._read_piece(offset, piece)


def offload(folder: Path, budget: int, kind: type[FileStore] = FileStore, least: int = 1) -> Offload:
    """Everything of `least` bytes on may be moved."""
    return Offload(lambda: FileMover(kind(folder, ROOM)), budget, least)


Making = Callable[[Path], Offload]
