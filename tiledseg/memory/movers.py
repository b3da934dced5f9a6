"""Which mover a store asks for: of a GPU's tensors to its host's memory, of a CPU's to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tiledseg.memory.mover import HOST, Mover


def mover_to(store: str | Path, device: torch.device, limit: int) -> Callable[[], Mover]:
    """What makes one, of at most `limit` bytes outside. Whether `device` has a way there is for the caller to check."""
    if str(store) == HOST:
        from tiledseg.memory.host.host_mover import HostMover
        from tiledseg.memory.host.lanes import GpuLanes

        return lambda: HostMover(GpuLanes(device), limit)

    from tiledseg.memory.disk.file_mover import FileMover
    from tiledseg.memory.disk.file_store import FileStore

    return lambda: FileMover(FileStore(store, limit))
