"""The writing of files in the middle of a run: whole or not at all, and one line where the disk does not take them.

Standard library only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiledseg.errors import TiledsegError, WriteError
from tiledseg.system.outputs import temporary

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn, here alone, a refusal of the operating system while `path` is written into a WriteError that names it.

    Bytes written before stay as they are; errors of this project pass as they are.
    """
    try:
        yield
    except TiledsegError:
        raise
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: str | Path, error: Exception) -> WriteError:
    """Return the one line for a file that could not be written."""
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else " ".join(str(error).split())
    remedy = _REMEDIES.get(number or 0, "see that it can be written")
    return WriteError(f"cannot write {path}: {reason}; {remedy}, then run the command again")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the temporary name to write `path` under; at the block's end that file, flushed to the disk, is `path`.

    Ended at any moment, `path` is the old file or the new one. A failed write leaves no temporary file, and is a
    WriteError.
    """
    part = temporary(path)
    with writing(path):
        try:
            part.unlink(missing_ok=True)  # of a killed run; and a link there must not be followed
            yield part
            flush(part)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one. Raises WriteError."""
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def flush(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
