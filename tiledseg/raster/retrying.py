"""Reading of input: an unforeseen error becomes one line that names the file, and a refused read is tried again.

A file server that is slow to answer, or comes back after a failure, must not end a job of a thousand ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rasterio.errors import RasterioError

from tiledseg.errors import RasterError, TiledsegError

DAMAGED = "the file may be truncated or damaged: copy it again"


@contextmanager
def reading(what: str, remedy: str = DAMAGED) -> Iterator[None]:
    """Turn any exception of the body into a RasterError "cannot `what`: reason; `remedy`", the first as its cause.

    Errors raised on purpose pass as they are. `what` names the file: "read rows 0:9 of a.tif". Libraries that parse
    a stranger's bytes raise what their authors did not foresee; a wrong file must still be one line.
    """
    try:
        yield
    except TiledsegError:
        raise
    except Exception as error:
        raise RasterError(f"cannot {what}: {reason(error)}; {remedy}") from error


def reason(error: Exception) -> str:
    """Return the error's own words on one line: GDAL's, which rasterio keeps in the cause; other errors with their
    class."""
    cause = error.__cause__ or error
    text = " ".join(str(getattr(cause, "errmsg", None) or cause).split())[:300]
    if isinstance(error, (OSError, RasterioError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


T = TypeVar("T")

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before the second, third and fourth try. A file that is damaged is named after their sum."""


def tried(what: str, read: Callable[[], T], let_go: Callable[[], object]) -> T:
    """Return `read()`, tried again after each of the pauses where the system or GDAL refuses it, and after `let_go()`,
    which closes handles that may be stale. Raises RasterError, "cannot `what`: ...", for the last refusal, and for any
    other error at once.

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
