"""What libtiff prints on standard error by itself where a write fails, past every error handler: read, not shown."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from tiledseg.system.console import flush, say

_REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def libtiff_errors() -> Iterator[None]:
    """Raises an OSError with the number of the system's refusal that libtiff names inside, whether or not GDAL makes an
    error of it: at a file's closing it makes none.

    Standard error leads elsewhere inside: for the calls that write, and no longer. Other words follow at the end.
    """
    flush()
    shown, words = os.dup(2), os.memfd_create("libtiff")
    try:
        os.dup2(words, 2)
        try:
            yield
        finally:
            flush()
            os.dup2(shown, 2)
            _judge(os.pread(words, 2**16, 0).decode(errors="replace"))
    finally:
        os.close(words)
        os.close(shown)


def _judge(text: str) -> None:
    for number in _REASONS:
        if os.strerror(number) in text:
            raise OSError(number, os.strerror(number))
    for line in text.splitlines():
        say(line)
