"""Errors, in words that a user can act on.

A message is one line: what is wrong, both values, what to do. `InputError` and its children mean bad input (exit 2);
anything else is a failure of the run (exit 1). Either is one line; a traceback is shown on request. Each class is also
the built-in that a caller would expect to catch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

VERSION = "0.1.0"


class TiledsegError(Exception):
    """The root of every error raised on purpose; `exit_code`: the code that a command exits with."""

    exit_code = 1


class InputError(TiledsegError):
    """An error in what the user gave; nothing has been started or written."""

    exit_code = 2


class ConfigError(InputError, ValueError):
    """A flag or configuration key is unknown, malformed, or contradicts another."""


class BudgetError(ConfigError, MemoryError):
    """A step that fits its memory budget by no choice of what is kept, before any work. `least`: the bytes that it
    needs at least, where they are known."""

    least: int | None = None


class GeometryError(InputError, ValueError):
    """A grid, halo or size that no tiling or network can have."""


class RasterError(InputError, OSError):
    """An image or label file is missing, truncated, unreadable, or does not match its partner."""


class LabelError(InputError, ValueError):
    """A label value outside the classes."""


class CheckpointError(InputError, OSError):
    """A checkpoint is missing, damaged, or of another model."""


class OutputError(InputError, OSError):
    """An output cannot be written."""


class WriteError(TiledsegError, OSError):
    """A file could not be written in the middle of a run (disk full, limit, folder gone); what was whole before stays
    whole. One line suffices: the fault is the disk's."""


class ReadError(TiledsegError, OSError):
    """A file that the first rank has looked at cannot be read by this one, or has become another since."""


class MemoryLimitError(TiledsegError, MemoryError):
    """Memory, or a store beside it, is too small for what was asked: the message says how much that was, how much there
    is, and what would fit."""


class CommunicationError(TiledsegError, RuntimeError):
    """A peer or the transport failed."""


@contextmanager
def renamed(keys: Mapping[str, str]) -> Iterator[None]:
    """Have errors of bad input name keys as their caller writes them: `--bands` in the place of data.bands."""
    try:
        yield
    except InputError as error:
        words = str(error)
        for key, name in keys.items():
            words = re.sub(rf"\b{re.escape(key)}\b(?! true \(train\))( true)?", name, words)
        error.args = (words,)
        raise


@contextmanager
def explained(notes: Iterable[str]) -> Iterator[None]:
    """Have errors of bad input end with the notes on a raster, such as of a band that is read as validity."""
    try:
        yield
    except InputError as error:
        error.args = ("; ".join((str(error), *notes)),)
        raise


def install(extra: str) -> str:
    """Return how to install an extra: no index of packages has tiledseg, so it is from a clone or a wheel."""
    wheel = f"tiledseg-{VERSION}-py3-none-any.whl"
    return f"pip install '.[{extra}]' in a clone of tiledseg, or pip install '{wheel}[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message; the error's class where it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
