"""Files as they lie on the disk: what kind a path is. Standard library only."""

from __future__ import annotations

import os
import stat

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def irregular_kind(path: str | os.PathLike[str]) -> str | None:
    """What `path` leads to, links followed, where that is no regular file ("a FIFO"); None for a file or nothing.

    Opening a FIFO waits for a writer, and a device may never end: ask before any `open`.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)
