"""Runs the parts one after the other, each with a limit, the whole with one too; who fails, fails alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.lines import read_lines, write_line

PARTS = "benchmarks.gpu"
_LAST_WORDS = 5.0  # seconds between SIGTERM and SIGKILL


LOG = "battery.log"


@dataclass(frozen=True)
class Program:
    """A part: the name of its module and the seconds that it may take."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Place:
    """Where results go, and all else; and whether sizes are small."""

    folder: Path
    work: Path
    small: bool


def run_parts(programs: Sequence[Program], place: Place, seconds: float, environ: Mapping[str, str]) -> list[str]:
    """Runs all within `seconds`; the names of the parts that failed or were left out."""
    end = time.monotonic() + seconds
    failed = []
    for program in programs:
        left = end - time.monotonic() - _LAST_WORDS
        if left < 1:
            reason = f"the battery's {seconds:.0f} s are used up"
            write_line(place.folder, program.name, "part", "skipped", 0, reason=reason)
            failed.append(program.name)
        elif not _run(program, place, min(program.seconds, left), environ):
            failed.append(program.name)
    return failed


def _run(program: Program, place: Place, limit: float, environ: Mapping[str, str]) -> bool:
    """True where the part ended by itself with code 0. What it prints goes to the log."""
    folder, log = place.folder, place.folder / LOG
    words = ["--out", str(folder), "--work", str(place.work), "--seconds", f"{limit:.1f}"]
    command = [sys.executable, "-m", f"{PARTS}.{program.name}", *words, *(["--small"] if place.small else [])]
    begun, before = time.monotonic(), len(read_lines(folder))
    with log.open("a") as output:
        print(f"== {program.name}", file=output, flush=True)
        said = output.tell()
        code = _code(command, limit, environ, output)
    seconds = time.monotonic() - begun
    if code is None:
        write_line(folder, program.name, "part", "failed", seconds, reason=f"ran longer than {limit:.0f} s")
    elif code == 0:
        write_line(folder, program.name, "part", "ok", seconds, value="done")
    elif code == 1 and _told(folder, before):
        write_line(folder, program.name, "part", "failed", seconds, reason="see its lines that say failed")
    else:
        reason = f"ended with code {code}: {_last_line(log, said)}"
        write_line(folder, program.name, "part", "failed", seconds, reason=reason)
    return code == 0


def _code(command: Sequence[str], limit: float, environ: Mapping[str, str], output: IO[str]) -> int | None:
    """What a program exits with; None where it had to be ended after `limit` seconds."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            _end(process)


def _told(folder: Path, before: int) -> bool:
    """Whether a line since then says that something failed."""
    return any(line["state"] == "failed" for line in read_lines(folder)[before:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the part and all that it has started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS)
            return


def _last_line(path: Path, begin: int) -> str:
    """Of what the log holds from byte `begin` on."""
    lines = [line for line in path.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
