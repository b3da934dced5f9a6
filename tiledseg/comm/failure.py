"""The last words of a failing rank, and its exit code. Standard library only, so that every command can use it."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from tiledseg.comm.launch import Launch
from tiledseg.errors import CommunicationError, TiledsegError
from tiledseg.system.console import flush, say
from tiledseg.system.signals import Stopped, ending, largest_code_counts

E = TypeVar("E", bound=TiledsegError)

TRACEBACK = "TILEDSEG_TRACEBACK"
_LONGEST = 640  # characters of a message

# A launcher ends the other ranks within a second or two of the first failure. A rank that fails because a peer is gone,
# or with rank 0's own error, waits this long before it prints: the launcher has usually ended it by then.
GRACE_SECONDS = 5.0
_TURN_SECONDS = 1.5
_LAST_TURN_SECONDS = 3.0
_PASS_ON_SECONDS = 0.3
_LINGER_SECONDS = 1.0
_IMPORT_SECONDS = 3.0  # by which a rank may come later to the same error


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 130 for an interrupt, 75 for a signal to stop, a SystemExit's own code, 1 otherwise."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, (TiledsegError, Stopped)) else 1


def mark_agreed(error: E) -> E:
    """Mark an error that every rank raises with the same message, so that only rank 0 prints it. Return the error."""
    vars(error)["agreed"] = True
    return error


def is_agreed(error: BaseException) -> bool:
    return bool(getattr(error, "agreed", False))


def describe(error: BaseException) -> str:
    """Return the error in one line: its message, after the class's name if the error is not one of tiledseg's."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:  # what is wrong and the remedy stand at its ends
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    if isinstance(error, TiledsegError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def report(error: BaseException, speaker: str = "") -> None:
    """Write `error: [speaker: ]message` to standard error, in one line and one write: lines of ranks do not mix.

    The line of an unforeseen error says how to get its traceback, which follows if the user has asked for it.
    `speaker` is "rank 3 on host", or empty.
    """
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return
    text = f"error: {speaker}: {describe(error)}" if speaker else f"error: {describe(error)}"
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, Stopped):
        text = str(error)
    elif os.environ.get(TRACEBACK, "0") not in ("", "0"):
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    elif not isinstance(error, (TiledsegError, SystemExit)):
        text += f" (unforeseen; {TRACEBACK}=1 shows where)"
    flush()
    say(text)


def report_from(error: BaseException, launch: Launch, host: str, lost: Callable[[float], str] | None = None) -> None:
    """Report an error in the middle of a job, with the rank's name; late if a lost peer may be its cause.

    Ranks print one after the other, the lowest first: if many fail alike, the launcher ends the others before they
    print. `lost` names the lost peers, after at least the given seconds; None in a job without a watch.
    """
    if launch.size == 1:
        report(error)
        return
    if isinstance(error, (KeyboardInterrupt, Stopped)) and not launch.is_root:
        return
    turn = min(launch.rank * _TURN_SECONDS, _LAST_TURN_SECONDS)
    if isinstance(error, CommunicationError):
        turn += _LINGER_SECONDS if launch.is_root else 0.0  # rank 0 may keep the store that the others still read
        if lost is None:
            time.sleep(GRACE_SECONDS)
        elif named := lost(GRACE_SECONDS):
            error.args = (f"{named}; {error}",)
    time.sleep(turn)
    report(error, f"rank {launch.rank} on {host}")


def report_before_mesh(error: BaseException, launch: Launch, host: str) -> None:
    """Report an error that all ranks are likely to raise, such as a wrong flag: rank 0 at once, others late.

    The other ranks wait for the launcher to end them, and print if it does not: the fault is then their own. Under
    launchers that return the largest code, rank 0 leaves later: TERM would give 143 to ranks that still import.
    """
    code = exit_code(error)
    ending(code)
    if launch.is_root:
        report(error)
        if launch.size > 1:
            wait_until_read()
            time.sleep(_IMPORT_SECONDS if largest_code_counts() else 0.0)
        return
    _wait_to_be_ended(code)
    if not isinstance(error, (KeyboardInterrupt, Stopped)):
        report(error, f"rank {launch.rank} on {host}")


def _wait_to_be_ended(code: int) -> None:
    """Wait for the launcher's signal and leave with `code`, not with the signal's: srun returns the largest code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(GRACE_SECONDS + _IMPORT_SECONDS)


def wait_until_read(seconds: float = 3.0) -> None:
    """Wait, at most `seconds`, until the launcher has read this rank's output, and a moment more to pass it on.

    mpirun reads the output of its ranks through pipes, and may drop the last lines of a rank that fails: seen with
    Open MPI 5.0.11 on a busy machine.
    """
    flush()
    end = time.monotonic() + seconds
    while any(_unread_bytes(descriptor) for descriptor in (1, 2)) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(_PASS_ON_SECONDS)


def _unread_bytes(descriptor: int) -> int:
    """Return the unread bytes in the pipe of a descriptor; 0 if it is no pipe or the system cannot say."""
    try:
        import fcntl
        import termios

        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    except (ImportError, OSError):
        return 0
