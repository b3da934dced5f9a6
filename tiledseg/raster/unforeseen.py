"""The one place where whatever goes wrong inside reading of input becomes one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    """The error's own words on one line: GDAL's, which rasterio keeps in the cause; other errors with their class."""
    cause = error.__cause__ or error
    text = " ".join(str(getattr(cause, "errmsg", None) or cause).split())[:300]
    if isinstance(error, (OSError, RasterioError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
