"""Signals that end a job early: USR1 (Slurm's --signal), USR2 (LSF's -wa) and TERM, from a program's first moment.

The effect of a signal depends on how far the program is:

- before `run`, while modules are imported: the process leaves at once with 75, for nothing has begun;
- in a command: `Stopped` is raised in the main thread, unwinds all that is unfinished, and the process leaves with 75.
  Within an import, whose native code may abort the process or swallow it, it waits for the import's end;
- in training (`deferring`): it is remembered, and acted on at the edge of the step, with a checkpoint;
- where the exit code is decided (`ending`): TERM, by which launchers end the other ranks, ends the process with it.

Under srun and jsrun TERM gives 143, not 75, before the first step. They send it where one task has failed and return
the largest code of all: with 75 a batch script would submit a failing job again. Before `listen`, the first 0.05 s or
so of Python's own start, a signal ends the process as ever. Standard library only.
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
_AGAIN = 0.02  # seconds after which a signal that has met an import comes once more
_ENDED_BY_TERM = 128 + signal.SIGTERM
_SIZES_OF_LARGEST = ("SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE")  # launchers that return the largest code


class Stopped(BaseException):
    """A signal has come where nothing is kept yet. No Exception: nothing but the end of the command catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: run the command again")
        self.exit_code = exit_code_of(number)


class _State:
    """The state of this process: what a signal does now, the first one met, and the exit code where it is decided."""

    does: str = "leave"  # or raise, wait, nothing, end
    met: int | None = None
    code: int = 0


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that a signal has stopped before there was anything to keep."""
    return _ENDED_BY_TERM if number == signal.SIGTERM and largest_code_counts() else STOPPED


def largest_code_counts() -> bool:
    """Return True for several ranks of srun or jsrun, which end the others by TERM and return the largest code."""
    return any(os.environ.get(name, "1") != "1" for name in _SIZES_OF_LARGEST)


def listen() -> None:
    """Take the signals for the life of the process: the first thing that a program does, before its imports."""
    _set("leave")
    for number in SIGNALS:
        signal.signal(number, _on_signal)


@contextmanager
def listening() -> Iterator[None]:
    """Let signals raise `Stopped` inside. Former handlers come back at the end if the program does not `listen`."""
    with _handlers():
        _set("raise")
        yield


@contextmanager
def deferring() -> Iterator[None]:
    """Only remember signals from here on: ask `is_met`."""
    with _handlers():
        _State.does = "wait"
        yield


def is_met() -> bool:
    """Return True if a signal has come."""
    return _State.met is not None


def swallowed() -> Stopped | None:
    """Return the `Stopped` that has been raised, if any. Native code that imports may catch it, and leave modules half
    there, at which something else then fails."""
    return Stopped(_State.met) if _State.does == "nothing" and _State.met is not None else None


def ending(code: int) -> None:
    """Fix the exit code: the process is about to leave with `code`, whatever else comes."""
    _State.does, _State.code = "end", code


@contextmanager
def _handlers() -> Iterator[None]:
    """Install our handlers; at the end put the former ones back, unless they were ours already."""
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
