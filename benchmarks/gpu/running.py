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

from lines import read_lines, write_line

HERE = Path(__file__).resolve().parent
_LAST_WORDS = 5.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Program:
    """A part: the name of its file and the seconds that it may take."""

    name: str
    seconds: float


def run_parts(
    programs: Sequence[Program], folder: Path, small: bool, seconds: float, environ: Mapping[str, str]
) -> list[str]:
    """Runs all within `seconds`; the names of the parts that failed or were left out."""
    end = time.monotonic() + seconds
    failed = []
    for program in programs:
        left = end - time.monotonic() - _LAST_WORDS
        if left < 1:
            write_line(folder, program.name, "part", "skipped", 0, reason=f"the battery's {seconds:.0f} s are used up")
            failed.append(program.name)
        elif not _run(program, folder, small, min(program.seconds, left), environ):
            failed.append(program.name)
    return failed


def _run(program: Program, folder: Path, small: bool, limit: float, environ: Mapping[str, str]) -> bool:
    """True where the part ended by itself with code 0. What it prints goes to FOLDER/PART.log."""
    command = [sys.executable, str(HERE / f"{program.name}.py"), "--out", str(folder), "--seconds", f"{limit:.1f}"]
    begun = time.monotonic()
    before = len(read_lines(folder))
    log = folder / f"{program.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *(["--small"] if small else [])],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            reason = f"ran longer than {limit:.0f} s"
            write_line(folder, program.name, "part", "failed", time.monotonic() - begun, reason=reason)
            return False
    if code not in (0, 1) or (code == 1 and not _told(folder, before)):
        reason = f"ended with code {code}: {_last_line(log)}"
        write_line(folder, program.name, "part", "failed", time.monotonic() - begun, reason=reason)
    else:
        state = "ok" if code == 0 else "failed"
        found = {"value": "done"} if code == 0 else {"reason": "see its lines that say failed"}
        write_line(folder, program.name, "part", state, time.monotonic() - begun, **found)
    return code == 0


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


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
