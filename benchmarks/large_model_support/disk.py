"""What the disk gives: to `dd`, and to the store, one after the other in one run."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np

from tiledseg.memory.aligned import aligned_bytes
from tiledseg.memory.file_store import PIECE, FileStore


def dd_rates(folder: Path, size: int) -> tuple[float, float]:
    """Bytes a second written and read past the system's cache."""
    path = folder / "dd-file"
    count = size // PIECE
    try:
        written = _seconds("dd", "if=/dev/zero", f"of={path}", f"bs={PIECE}", f"count={count}", "oflag=direct")
        read = _seconds("dd", f"if={path}", "of=/dev/null", f"bs={PIECE}", f"count={count}", "iflag=direct")
    finally:
        path.unlink(missing_ok=True)
    return count * PIECE / written, count * PIECE / read


def store_rates(folder: Path, size: int, tensor: int = 32 << 20) -> tuple[float, float]:
    """The same of a store, in tensors of `tensor` bytes that lie as torch's do; written once before."""
    data = np.random.default_rng(0).integers(0, 256, tensor + 64, np.uint8)[64:]
    into = aligned_bytes(tensor)
    with FileStore(folder, 2 * size) as store:
        slots = [store.take(tensor) for _ in range(size // tensor)]
        rates = []
        for copy, array in ((store.write, data), (store.write, data), (store.read, into)):
            begun = time.perf_counter()
            for transfer in [copy(slot, array) for slot in slots]:
                transfer.wait()
            rates.append(len(slots) * tensor / (time.perf_counter() - begun))
    return rates[1], rates[2]


def _seconds(*command: str) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - begun
