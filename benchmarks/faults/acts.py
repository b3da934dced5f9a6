"""What befalls a run: its process gets a signal or a limit, or the files that it reads and writes are changed.

Every act works in the case's folder, which holds `image.tif`, `val.tif`, `labels.tif` of both, `run.yaml` and the run's
folder `run`.
Files are written over or cut in place, as a failing disk or a second job does; what vanishes is moved to `away`.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.forks import limit_files

IMAGE, JUDGED, METRICS, CHECKPOINTS = map(Path, ("image.tif", "val.tif", "run/metrics.jsonl", "run/checkpoints"))
AWAY = Path("away")
_FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")


def _signal(number: signal.Signals) -> Callable[[int], None]:
    return lambda draw: os.kill(os.getpid(), number)


def _cut(path: Path, draw: int) -> None:
    """Leaves less than the whole file, and may leave nothing."""
    os.truncate(path, draw % path.stat().st_size)


def _write(value: float, draw: int, path: Path = IMAGE) -> None:
    """One pixel of one band has another value."""
    import numpy as np
    import rasterio
    from rasterio.windows import Window

    with rasterio.open(path, "r+") as file:
        row, col, band = draw % file.height, draw // file.height % file.width, draw % file.count
        file.write(np.full((1, 1), value, np.float32), band + 1, window=Window(col, row, 1, 1))


def _newest_file(draw: int) -> Path:
    newest = max(CHECKPOINTS.glob("step-*"))
    return newest / _FILES[draw % len(_FILES)]


def _flip(draw: int) -> None:
    """One bit of a file of the newest checkpoint."""
    path = _newest_file(draw)
    data = bytearray(path.read_bytes())
    data[draw % len(data)] ^= 1 << draw % 8
    path.write_bytes(data)


def _move_away(path: Path) -> None:
    os.replace(path, AWAY)


ACTS: dict[str, Callable[[int], None]] = {
    "kill": _signal(signal.SIGKILL),
    "term": _signal(signal.SIGTERM),
    "usr1": _signal(signal.SIGUSR1),
    "stop": _signal(signal.SIGSTOP),
    "limit": limit_files,
    "cut raster": lambda draw: _cut(IMAGE, draw),
    "write NaN": lambda draw: _write(math.nan, draw),
    "write 7": lambda draw: _write(7.0, draw),
    "write validation": lambda draw: _write(7.0, draw, JUDGED),
    "write 3e38": lambda draw: _write(3e38, draw),
    "move raster": lambda draw: _move_away(IMAGE),
    "move checkpoints": lambda draw: _move_away(CHECKPOINTS),
    "move run": lambda draw: _move_away(Path("run")),
    "flip checkpoint": _flip,
    "cut checkpoint": lambda draw: _cut(_newest_file(draw), draw),
    "cut metrics": lambda draw: _cut(METRICS, draw),
}
