"""What the disk gives to `dd`."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

PIECE = 4 << 20  # bytes that are copied at once


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


def _seconds(*command: str) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - begun
