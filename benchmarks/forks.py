"""Functions in forked children of this process, as one or several ranks: captured, limited in time, interrupted.

This process has imported everything and has no thread but its own, so that a child costs its own work only, and shared
pages lie in memory once. Several ranks find each other as under torchrun. Nobody ends the others when one fails, as
under srun: they have to notice. A child that outlives its limit is killed and counts as a hang. Linux.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiledseg
from tiledseg.raster import mirrored_reader
from tiledseg.system.signals import SIGNALS, listen

LIMIT_SECONDS = 20.0
_TICK_SECONDS = 1.0
_FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "os.rmdir", "os.link")


def import_all() -> None:
    """Import all of this library, and what its commands import where it is installed, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as a session has it, for the ranks that are forks
    for module in pkgutil.walk_packages(tiledseg.__path__, "tiledseg."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for extra in ("torch.utils.tensorboard", "matplotlib.figure"):
        with contextlib.suppress(ImportError):
            importlib.import_module(extra)
    sys.modules["torch"].set_num_threads(1)
    mirrored_reader.PAUSES = (0.0, 0.0, 0.0)  # damaged files are tried as often, but at once


@dataclass(frozen=True)
class Interruption:
    """An interruption of a child: at its `event`-th touch of a file, or after `seconds`, it gets `signal`; or no file
    may grow beyond `largest_file` bytes."""

    signal: str = ""
    event: int | None = None
    seconds: float | None = None
    largest_file: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of a child: `code` is negative where a signal ended it."""

    code: int
    out: str
    err: str
    seconds: float
    hung: bool


def run_function(
    body: Callable[[], int], folder: Path, interruption: Interruption | None = None, limit: float = LIMIT_SECONDS
) -> Outcome:
    """Call a function in a forked child in `folder`; its exit code is the function's."""
    return _run(body, [{}], folder, limit, interruption=interruption)[0]


def run_ranks(
    body: Callable[[], int],
    ranks: int,
    folder: Path,
    limit: float,
    per_node: int = 0,
    grace: float = 15.0,
    look: Callable[[Mapping[int, int]], object] = len,
) -> list[Outcome]:
    """Call `body` in `folder` on so many ranks. `per_node`: of how many ranks each says that they share its node (all).
    A rank still there after `limit` seconds, or `grace` seconds after one has failed, is killed. `look`: called every
    second with the processes that are left, by rank.

    This process must not have opened a process group.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    variables = [torchrun_variables(rank, ranks, per_node or ranks, port) for rank in range(ranks)]
    return _run(body, variables, folder, limit, grace, look)


def _run(
    body: Callable[[], int],
    variables: Sequence[Mapping[str, str]],
    folder: Path,
    limit: float,
    grace: float = 0.0,
    look: Callable[[Mapping[int, int]], object] = len,
    interruption: Interruption | None = None,
) -> list[Outcome]:
    begun = time.monotonic()
    end, signalled = begun + limit, float("inf")
    if interruption is not None and interruption.seconds is not None:
        signalled = begun + interruption.seconds
    started = [_fork(body, folder, interruption, own) for own in variables]
    left = {rank: child for rank, (child, _) in enumerate(started)}
    handles = {os.pidfd_open(child): rank for rank, child in left.items()}
    said = {pipe: b"" for _, pipes in started for pipe in pipes}
    speaking = set(said)
    ends: dict[int, tuple[int, float]] = {}
    hung: set[int] = set()
    try:
        while left:
            look(left)
            wait = min(end, signalled, time.monotonic() + _TICK_SECONDS) - time.monotonic()
            for handle in select.select([*handles, *speaking], [], [], max(0.0, wait))[0]:
                if handle in said:  # a rank whose pipe is full would stand still
                    more = os.read(handle, 2**16)
                    said[handle] += more
                    speaking -= set() if more else {handle}
                    continue
                rank = handles.pop(handle)
                os.close(handle)
                code = os.waitstatus_to_exitcode(os.waitpid(left.pop(rank), 0)[1])
                ends[rank] = code, time.monotonic() - begun
                end = min(end, time.monotonic() + grace) if code else end
            if time.monotonic() >= end:
                hung, end = set(left), float("inf")
                _kill(left)
            elif interruption is not None and time.monotonic() >= signalled:
                signalled = float("inf")
                for child in left.values():
                    os.kill(child, signal.Signals[interruption.signal])
    finally:
        _kill(left)
    outcomes = []
    for rank, (_, pipes) in enumerate(started):
        code, seconds = ends[rank]
        out, err = ((said[pipe] + _read(pipe)).decode(errors="replace") for pipe in pipes)
        outcomes.append(Outcome(code, out, err, seconds, rank in hung))
    return outcomes


def torchrun_variables(rank: int, size: int, per_node: int, port: int) -> dict[str, str]:
    """Return what torchrun sets, for ranks of one machine that say they are on nodes of `per_node` ranks each; but no
    store of its own: rank 0 keeps it."""
    on_node = min(per_node, size - rank // per_node * per_node)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": on_node}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {name: str(value) for name, value in place.items()}


def _kill(children: Mapping[int, int]) -> None:
    for child in children.values():
        os.killpg(child, signal.SIGKILL)


def _fork(
    body: Callable[[], int], folder: Path, interruption: Interruption | None, variables: Mapping[str, str]
) -> tuple[int, tuple[int, int]]:
    """Return the number of a forked child that calls a function, and where its standard output and error are read."""
    pipes = [os.pipe(), os.pipe()]  # a file would meet the limits of size that cases set
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child listens, as programs do before their imports
    child = os.fork()
    if child == 0:
        listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ.update(variables)
        _be_child(body, folder, [write for _, write in pipes], interruption)
    os.setpgid(child, child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for _, write in pipes:
        os.close(write)
    return child, (pipes[0][0], pipes[1][0])


def _read(read: int) -> bytes:
    with open(read, "rb") as file:
        return file.read()


def _be_child(body: Callable[[], int], folder: Path, outputs: list[int], interruption: Interruption | None) -> None:
    code = 99
    try:
        os.chdir(folder)
        for descriptor, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        gc.freeze()  # a search for garbage would write to shared pages
        if interruption is not None:
            _arm(interruption)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond `size` bytes, as on a full disk: writing fails, no signal ends it."""
    sys.dont_write_bytecode = True  # others would find it half written
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _arm(interruption: Interruption) -> None:
    if interruption.largest_file is not None:
        limit_files(interruption.largest_file)
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
