"""Signals that end a job early: USR1 (Slurm's --signal), USR2 (LSF's -wa) and TERM, from a program's first moment.

The effect of a signal depends on how far the program is:

- before the command, while modules are imported: the process exits at once with 75, since nothing has begun;
- in a command: `Stopped` is raised in the main thread and the process exits with 75. During an import, whose native
  code may abort the process or swallow the exception, the signal waits for the import's end;
- in training (`deferring`): the signal is remembered; the run saves a checkpoint at the end of the step and stops;
- once the exit code is decided (`ending`): TERM, by which launchers end the other ranks, ends the process with it.

Under srun and jsrun TERM gives 143, not 75, before the first step. They send it when one task has failed and return the
largest code of all: with 75 a batch script would submit a failing job again. Before `listen`, in the first 0.05 s of
Python's own start, a signal ends the process as usual. Standard library only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75  # "stopped early, run it again": what a batch script requeues on
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_AGAIN = 0.02  # seconds after which a signal is sent again if it came during an import
_ENDED_BY_TERM = 128 + signal.SIGTERM
_SIZES_OF_LARGEST = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE")  # launchers that return the largest code


class Stopped(BaseException):
    """A signal before there is anything to keep. A BaseException: only the end of the command catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: run the command again")
        self.exit_code = exit_code_of(number)


class _State:
    """The state of this process: the present effect of a signal, the first signal met, and the decided exit code."""

    does: str = "leave"  # or raise, wait, nothing, end
    met: int | None = None
    code: int = 0


def exit_code_of(number: int) -> int:
    """Return the exit code of a process stopped by a signal before there is anything to keep."""
    return _ENDED_BY_TERM if number == signal.SIGTERM and largest_code_counts() else STOPPED


def largest_code_counts() -> bool:
    """Return True under srun or jsrun with several ranks: they end ranks by TERM and return the largest code."""
    return any(os.environ.get(name, "1") != "1" for name in _SIZES_OF_LARGEST)


def listen() -> None:
    """Install our handlers for the life of the process. A program calls it first, before its imports."""
    _set("leave")
    for number in SIGNALS:
        signal.signal(number, _on_signal)


@contextmanager
def listening() -> Iterator[None]:
    """Let signals raise `Stopped` inside. At the end, restore former handlers unless the program listens itself."""
    with _handlers():
        _set("raise")
        yield


@contextmanager
def deferring() -> Iterator[None]:
    """Only remember signals inside, for `is_met`."""
    with _handlers():
        _State.does = "wait"
        yield


def is_met() -> bool:
    """Return True if a signal has come."""
    return _State.met is not None


def swallowed() -> Stopped | None:
    """Return the `Stopped` that has been raised, if any. Native code may catch it in an import and leave half a module,
    so that another error follows."""
    return Stopped(_State.met) if _State.does == "nothing" and _State.met is not None else None


def ending(code: int) -> None:
    """Fix the exit code: from here on TERM ends the process with `code`."""
    _State.does, _State.code = "end", code


@contextmanager
def _handlers() -> Iterator[None]:
    """Install our handlers; at the end restore the former ones, unless they were ours."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    if former[SIGNALS[0]] is _on_signal or threading.current_thread() is not threading.main_thread():
        yield
        return
    _set("wait")
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _set(does: str) -> None:
    _State.does, _State.met = does, None


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _State.does == "end" and number == signal.SIGTERM:
        os._exit(_State.code)
    _State.met = _State.met or number
    if _State.does == "leave":
        os._exit(exit_code_of(number))
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if _State.does == "raise" and frame is not None:  # within an import
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif _State.does == "raise":
        _State.does = "nothing"  # one is enough: what follows would interrupt the unwinding
        raise Stopped(number)
