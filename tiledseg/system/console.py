"""A command's output: its answer (the result) on standard output, warnings and progress on standard error.

An answer that cannot be written fails the command (one line, exit 1). A failed warning or progress line is ignored: a
full disk under a log does not end a run. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import IO, NoReturn

from tiledseg.errors import WriteError
from tiledseg.system.files import write_error

_STANDARD_OUTPUT = "standard output"


def counted(number: int, what: str) -> str:
    """Return "1 thing" or "2 things", for a thing whose plural ends in an s."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def answer(text: str) -> None:
    """Write `text` and a newline to standard output, and flush. Raises WriteError."""
    if sys.stdout is None:
        raise WriteError(f"cannot write {_STANDARD_OUTPUT}: it is closed; send it to a file, or to /dev/null")
    with answering():
        sys.stdout.write(text + "\n")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Flush standard output at the end of the block. Raises WriteError if a write fails, and SystemExit(1), which
    nothing reports, if the reader has closed the pipe (`| head`)."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except WriteError:
        raise
    except BrokenPipeError:
        _drop(sys.stdout)
        raise SystemExit(1) from None
    except OSError as error:
        _drop(sys.stdout)
        raise write_error(_STANDARD_OUTPUT, error) from error


def say(line: str) -> None:
    """Write one line to standard error in one write, wrapped between words on a terminal. Errors are ignored; names of
    files may hold bytes that are no text."""
    words = line.encode("utf-8", "backslashreplace").decode()
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            if sys.stderr.isatty() and "\n" not in words:  # a traceback stays as it is
                width = shutil.get_terminal_size().columns
                words = "\n  ".join(textwrap.wrap(words, width - 2, break_long_words=False, break_on_hyphens=False))
            sys.stderr.write(words + "\n")
            sys.stderr.flush()


def flush() -> None:
    """Flush both standard streams. Errors are ignored: a failing command calls it before it prints its error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def end(code: int) -> NoReturn:
    """End the process with `code`, without the interpreter's shutdown, which would write failed buffers again."""
    flush()
    os._exit(code)


def keep_descriptors() -> None:
    """Open the null device for standard descriptors that are closed.

    Otherwise the next opened file gets the number of one, and a library's output is written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def _drop(stream: IO[str]) -> None:
    """Discard the buffer's text, which the interpreter would write again at its end, and exit with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
