"""A command in a forked child of this process: captured, limited in time, and interrupted where a case says so.

The parent has imported everything and started no thread, so that a case costs its own work only. Commands run with one
thread; a child that outlives its limit is killed and counts as a hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledseg.raster import mirrored_reader
from tiledseg.system.signals import SIGNALS, listen

LIMIT_SECONDS = 20.0
_FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "os.rmdir", "os.link")


def warm_up() -> None:
    """Import what every command imports, once, with one thread: the forked cases share it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as a session has it, for the ranks that are forks
    for name in ("train", "predict", "tile", "scene", "training.start", "inference.predictor"):
        importlib.import_module(f"tiledseg.{name}")
    for extra in ("torch.utils.tensorboard", "matplotlib.figure"):
        with contextlib.suppress(ImportError):
            importlib.import_module(extra)
    sys.modules["torch"].set_num_threads(1)
    mirrored_reader.PAUSES = (0.0, 0.0, 0.0)  # damaged files are tried as often, but at once


@dataclass(frozen=True)
class Interruption:
    """What happens to a command: at its `event`-th touch of a file, or after `seconds`, it gets `signal`; or no file
    may grow beyond `largest_file` bytes."""

    signal: str = ""
    event: int | None = None
    seconds: float | None = None
    largest_file: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a command ended: `code` is negative where a signal ended it."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool


def run(
    command: str,
    arguments: Sequence[str],
    folder: Path,
    interruption: Interruption | None = None,
    limit: float = LIMIT_SECONDS,
    plant: Callable[[], None] | None = None,
) -> Outcome:
    """Runs `python -m tiledseg.COMMAND ARGUMENTS` in `folder`. `plant` is called first: a fault for the tests here."""

    def body() -> int:
        if plant is not None:
            plant()
        return int(importlib.import_module(f"tiledseg.{command}").main(list(arguments)))

    return run_function(body, folder, interruption, limit)


def run_function(
    body: Callable[[], int], folder: Path, interruption: Interruption | None = None, limit: float = LIMIT_SECONDS
) -> Outcome:
    """Runs a function in a forked child in `folder`; its exit code is the function's."""
    begun = time.monotonic()
    child, outputs = fork(body, folder, interruption)
    code, hung = _wait(child, begun, limit, interruption)
    out, err = map(_read, outputs)
    return Outcome(code, out, err, time.monotonic() - begun, hung)


def fork(
    body: Callable[[], int],
    folder: Path,
    interruption: Interruption | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, tuple[int, int]]:
    """A forked child that calls a function in `folder`, with `variables` in its environment: its number, and where its
    standard output and error are read."""
    pipes = [_pipe(), _pipe()]
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child listens, as programs do before their imports
    child = os.fork()
    if child == 0:
        listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ.update(variables or {})
        _be_child(body, folder, [write for _, write in pipes], interruption)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for _, write in pipes:
        os.close(write)
    return child, (pipes[0][0], pipes[1][0])


def _pipe() -> tuple[int, int]:
    """A pipe that holds all that a command says: a file would meet the limits of size that cases set."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 2**20)
    return read, write


def _read(read: int) -> str:
    with open(read, "rb") as file:
        return file.read().decode(errors="replace")


def _be_child(body: Callable[[], int], folder: Path, outputs: Sequence[int], interruption: Interruption | None) -> None:
    code = 99
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        for descriptor, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        gc.freeze()
        if interruption is not None:
            _arm(interruption)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _arm(interruption: Interruption) -> None:
    if interruption.largest_file is not None:
        sys.dont_write_bytecode = True  # others would find it half written
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (interruption.largest_file, interruption.largest_file))
    if interruption.event is None:
        return
    left = [interruption.event]
    number = signal.Signals[interruption.signal]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

    sys.addaudithook(watch)


def _wait(child: int, begun: float, limit: float, interruption: Interruption | None) -> tuple[int, bool]:
    """(exit code, whether the limit ended it). A signal after some seconds is sent from here."""
    handle = os.pidfd_open(child)
    try:
        if interruption is not None and interruption.seconds is not None:
            ready, _, _ = select.select([handle], [], [], interruption.seconds)
            if not ready:
                os.kill(child, signal.Signals[interruption.signal])
        ready, _, _ = select.select([handle], [], [], max(0.0, limit - (time.monotonic() - begun)))
        hung = not ready
        if hung:
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(status), hung
