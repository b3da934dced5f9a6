"""What a store on a local disk reaches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiledseg.memory.disk.file_store import FileStore

TENSOR = 32 << 20  # bytes


class StoreRates(NamedTuple):
    """Bytes a second."""

    written: float
    read: float


def store_rates(folder: str | Path, size: int, tensor: int = TENSOR) -> StoreRates:
    """Of `size` bytes in tensors of `tensor` bytes that lie as torch's do; written once before.

    Raises ConfigError where the folder takes no file, WriteError or MemoryLimitError where the disk has no room.
    """
    data = np.random.default_rng(0).integers(0, 256, tensor + 64, np.uint8)[64:]
    into = np.empty(tensor, np.uint8)
    with FileStore(folder, 2 * size) as store:
        slots = [store.take(tensor) for _ in range(size // tensor)]
        rates = []
        for copy, array in ((store.write, data), (store.write, data), (store.read, into)):
            begun = time.perf_counter()
            for transfer in [copy(slot, array) for slot in slots]:
                transfer.wait()
            rates.append(len(slots) * tensor / (time.perf_counter() - begun))
    return StoreRates(rates[1], rates[2])
