"""A read that the system refuses is tried again, a bounded number of times: a file server that is slow to answer, or
comes back after a failure, must not end a job of a thousand ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rasterio.errors import RasterioError

from tiledseg.errors import RasterError
from tiledseg.raster.unforeseen import DAMAGED, reading

T = TypeVar("T")

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before the second, third and fourth try. A file that is damaged is named after their sum."""


def tried(what: str, read: Callable[[], T], let_go: Callable[[], object]) -> T:
    """`read()`, tried again after each of the pauses where the system or GDAL refuses it, and after `let_go()`, which
    closes handles that may be stale. Raises RasterError, "cannot `what`: ...", for the last refusal, and for any other
    error at once.

    The law: what is read is read whole in one try.
    """
    with reading(what):
        for pause in PAUSES:
            try:
                return read()
            except (OSError, RasterioError, RasterError):  # the last: a file that is not there when it is opened anew
                time.sleep(pause)
                let_go()
        with reading(what, f"tried {1 + len(PAUSES)} times: {DAMAGED}"):
            return read()
