"""Files as they lie on the disk: what kind a path is, the text in it, and how many may be open. Standard library only.

A run holds a handle for each raster and reading thread, and a rank one for each peer. Met on the way, the limit of open
files would end the run with words about one innocent file, so a command raises it at its start."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from pathlib import Path

from tiledseg.errors import ConfigError, InputError

COMPANIONS_OF_NAME = (".msk", ".MSK", ".ovr", ".OVR", ".aux.xml", ".aux")
"""Endings behind a raster's whole name of files that GDAL reads with it: its masks and overviews, its PAM file."""

COMPANIONS_OF_STEM = (
    *(".aux", ".tfw", ".tifw", ".tiffw", ".wld", ".pgw", ".pngw", ".jgw", ".jpgw", ".jpegw", ".j2w", ".jp2w", ".prj"),
    *(".tab", ".imd", ".IMD", ".rpb", ".RPB", "_rpc.txt", "_RPC.TXT", ".att", ".ATT", ".xml", ".XML", ".hdr"),
)
"""The same in the place of a raster's ending: world files, projections, what sensors say."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def irregular_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of `path` ("a FIFO"), links followed, where it is no regular file; None for a file or nothing.

    Opening a FIFO waits for a writer, and a device may never end: ask before any `open`.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def delete(path: Path) -> None:
    """Delete a file, or a folder with all that is in it, as far as it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_text(path: str, kind: str, most_bytes: int, remedy: str, error: type[InputError]) -> str:
    """Return the text of a user's file: every loader of a text format reads through here. `kind` is what the file is
    taken for ("the list").

    Raises `error` for a FIFO, a device or a folder, for more than `most_bytes`, and for text that is not UTF-8.
    """
    irregular = irregular_kind(path)
    if irregular is not None:
        raise error(f"cannot read {kind} {path}: it is {irregular}; {remedy}")
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise error(f"{kind} {path} has {os.path.getsize(path)} bytes, of {most_bytes} at most; {remedy}")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"cannot read {kind} {path}: it is not text in UTF-8; {remedy}") from None
    except InputError:
        raise
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"cannot read {kind} {path}: {reason}; {remedy}") from None


_LEAST = 64  # what one rank with one image and a few reading threads takes, and room for libraries
_ENOUGH = 65536  # the most that is asked for: some programs walk through all numbers below the limit


def allow_open_files(enough: int = _ENOUGH, least: int = _LEAST, what: str = "") -> None:
    """Raise this process's limit as far as is `enough` and the system lets it.

    Raises ConfigError where that is fewer than `least`; `what`: whose they are, where it is not any run's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"no more than {hard} files may be open here, {least} are needed{what and f' {what}'}; raise it (ulimit -n)"
        )
