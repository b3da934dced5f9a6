"""The errors of the library.

A message is one line: what is wrong, both values, the remedy. `InputError` and its subclasses mean bad input (exit 2);
any other error is a failure of the run (exit 1). A traceback is shown on request. Each class is also the built-in
exception that a caller would expect to catch.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

VERSION = "0.1.0"


class TiledsegError(Exception):
    """The base of all errors raised by the library; `exit_code`: the code that a command exits with."""

    exit_code = 1


class InputError(TiledsegError):
    """An error in the user's input; nothing has been started or written."""

    exit_code = 2


class ConfigError(InputError, ValueError):
    """A flag or configuration key is unknown, malformed, or contradicts another."""


class BudgetError(ConfigError, MemoryError):
    """A step cannot fit its memory budget. `least`: the bytes that it needs at least, if known."""

    least: int | None = None


class GeometryError(InputError, ValueError):
    """A grid, halo or size is impossible for a tiling or network."""


class RasterError(InputError, OSError):
    """An image or label file is missing, truncated, unreadable, or does not match its partner."""


class LabelError(InputError, ValueError):
    """A label value is outside the classes."""


class CheckpointError(InputError, OSError):
    """A checkpoint is missing, damaged, or of another model."""


class OutputError(InputError, OSError):
    """An output cannot be written."""


class WriteError(TiledsegError, OSError):
    """A file could not be written during a run (disk full, limit, folder gone); complete files stay complete."""


class ReadError(TiledsegError, OSError):
    """A file that the root has read cannot be read by this rank, or has changed since."""


class MemoryLimitError(TiledsegError, MemoryError):
    """Memory, or a store, is exhausted. The message names the bytes needed, those available, and settings that fit."""


class CommunicationError(TiledsegError, RuntimeError):
    """A peer or the transport failed."""


@contextmanager
def renamed(keys: Mapping[str, str]) -> Iterator[None]:
    """Rename keys in the messages of InputErrors of the block, such as data.bands to `--bands`."""
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
    """Append a raster's notes to the messages of InputErrors of the block."""
    try:
        yield
    except InputError as error:
        error.args = ("; ".join((str(error), *notes)),)
        raise


def install(extra: str) -> str:
    """Return the commands that install an extra, from a clone or a wheel: no package index has tiledseg."""
    wheel = f"tiledseg-{VERSION}-py3-none-any.whl"
    return f"pip install '.[{extra}]' in a clone of tiledseg, or pip install '{wheel}[{extra}]'"


def installed(*modules: str) -> bool:
    """Return True if all modules of an extra are installed."""
    return all(importlib.util.find_spec(name) is not None for name in modules)


def require(what: str, extra: str, *modules: str) -> None:
    """Import all modules of an extra, which `what` needs. Raise ConfigError if one is missing or cannot be imported."""
    missing = []
    for module in modules:
        name = {"PIL": "Pillow"}.get(module, module)
        try:
            importlib.import_module(module)
        except ImportError as error:
            if installed(module):
                reason = f"cannot be imported: {first_line(error)}; try pip install --force-reinstall {name}"
                raise ConfigError(f"{what} needs {name}, which {reason}") from error
            missing.append(name)
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: {install(extra)}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
