"""Files on the disk: the kind of a path, a file's text, the limit of open files; and atomic writing, with a one-line
error if the disk refuses. Standard library only.

A run holds a handle for each raster and reading thread, and a rank one for each peer. At the limit of open files the
run would end with an error about an unrelated file, so a command raises the limit at its start.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiledseg.errors import ConfigError, InputError, TiledsegError, WriteError

COMPANIONS_OF_NAME = (".msk", ".MSK", ".ovr", ".OVR", ".aux.xml", ".aux")
"""Endings, after a raster's whole name, of files that GDAL reads with it: masks, overviews, PAM file."""

COMPANIONS_OF_STEM = (
    *(".aux", ".tfw", ".tifw", ".tiffw", ".wld", ".pgw", ".pngw", ".jgw", ".jpgw", ".jpegw", ".j2w", ".jp2w", ".prj"),
    *(".tab", ".imd", ".IMD", ".rpb", ".RPB", "_rpc.txt", "_RPC.TXT", ".att", ".ATT", ".xml", ".XML", ".hdr"),
)
"""Endings, in place of a raster's own, of files that GDAL reads with it: world files, projections, sensor metadata."""

STORE_FILES = ("zarr.json", ".zgroup", ".zmetadata", ".zarray")
"""File names by which a Zarr store is recognised: it holds at least one."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def irregular_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of `path` ("a FIFO"), following links; None for a regular file or if there is nothing.

    Call it before any `open`: opening a FIFO waits for a writer, and a device may never end.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def is_zarr(path: str | Path) -> bool:
    """Return True for a local folder that holds a Zarr store, under any name."""
    return os.path.isdir(path) and any(os.path.exists(os.path.join(path, file)) for file in STORE_FILES)


def temporary(path: str | Path) -> Path:
    """Return the temporary name, beside `path`, under which a file is written."""
    path = Path(path)
    return path.with_name(f".{path.name}.part")


def delete(path: Path) -> None:
    """Delete a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_text(path: str, kind: str, most_bytes: int, remedy: str, error: type[InputError]) -> str:
    """Return the text of a user's file, for every loader of a text format. `kind` names the file in errors ("the
    list").

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


_LEAST = 64  # open files of one rank with one image and a few reading threads, and of libraries
_ENOUGH = 65536  # not more: some programs loop over all numbers below the limit


def allow_open_files(enough: int = _ENOUGH, least: int = _LEAST, what: str = "") -> None:
    """Raise this process's limit of open files to `enough`, as far as the system allows.

    Raises ConfigError if the limit stays below `least`; `what` names the process in the message.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"no more than {hard} files may be open here, {least} are needed{what and f' {what}'}; raise it (ulimit -n)"
        )


_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn an OSError, or an error of GDAL, while `path` is written into a WriteError that names it. Errors of tiledseg
    pass unchanged."""
    try:
        yield
    except TiledsegError:
        raise
    except Exception as error:  # GDAL's errors share no class
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("rasterio", "pyogrio"):
            raise write_error(path, error) from error
        raise


def write_error(path: str | Path, error: Exception) -> WriteError:
    """Return the error of a file that could not be written."""
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else " ".join(str(error).split())
    remedy = _REMEDIES.get(number or 0, "see that it can be written")
    return WriteError(f"cannot write {path}: {reason}; {remedy}, then run the command again")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the temporary name under which to write `path`; at the block's end sync that file and rename it to `path`.

    If the process ends at any moment, `path` is the old file or the new one. A failed write deletes the temporary file
    and raises WriteError.
    """
    part = temporary(path)
    with writing(path):
        try:
            delete(part)  # a killed run's; and a link must not be followed
            yield part
            flush(part)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                delete(part)
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically: old or new, never a part. Raises WriteError."""
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def flush(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
