"""One rank failing ends the whole job, with its message and the right code, under real launchers."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.comm.launching import TORCHRUN, Done, clean_environment, free_port, mpirun, needs_mpirun, run_job

JOB = str(Path(__file__).with_name("job.py"))
SOON = 60.0  # seconds; a few where nothing else runs. Without what is tested: until the watch speaks, ten minutes
HINT = " (unforeseen; TILEDSEG_TRACEBACK=1 shows where)"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU for NCCL is here")
needs_torchrun = pytest.mark.skipif(TORCHRUN is None, reason="no torchrun beside this Python")


def seconds_to_end(done: Done) -> float:
    """From the failure of the last rank to the end of the job."""
    return done.ended - float(re.findall(r"failing at ([\d.]+)", done.out)[0])


def alone(*arguments: str, **variables: str) -> Done:
    return run_job([sys.executable, JOB, *arguments], environ=clean_environment(variables))


def check_line(done: Done, code: int, line: str) -> None:
    """One line says what is wrong, and the job ends soon after the failure of a rank."""
    assert (done.code, len(done.errors)) == (code, 1), done.err
    assert re.fullmatch(f"error: {line}", done.errors[0]), done.errors
    assert "Traceback" not in done.err
    assert "failing" not in done.out or seconds_to_end(done) < SOON


@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "arguments", "code", "line"),
    [
        (2, ["input"], 2, r"rank 1 on \S+: b.tif is truncated"),
        (2, ["crash", "--transport", "mpi"], 1, rf"rank 1 on \S+: ValueError: boom{re.escape(HINT)}"),
        (2, ["fine", "--wrong"], 2, "unrecognized arguments: --wrong.*"),
        pytest.param(
            2,
            ["fine", "--transport", "nccl"],
            2,
            "transport nccl needs a CUDA or ROCm GPU on every rank but rank 0 .*",
            marks=no_gpu,
        ),
    ],
)
def test_a_failing_job_ends_with_one_line(ranks: int, arguments: list[str], code: int, line: str) -> None:
    check_line(mpirun(ranks, JOB, *arguments), code, line)


@needs_mpirun
@pytest.mark.slow
def test_a_killed_rank_ends_the_job() -> None:
    """Over Gloo: `tests/crash/test_killed.py`."""
    done = mpirun(2, JOB, "kill", "--transport", "mpi")
    assert done.code == 137
    assert seconds_to_end(done) < SOON


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), [("stop early", 75), ("interrupt", 130)])
def test_exit_codes(way: str, code: int) -> None:
    """The code of one rank is the code of the job."""
    done = mpirun(2, JOB, way)
    assert (done.code, done.errors) == (code, [])
    assert "Traceback" not in done.err


def test_one_rank_alone_needs_no_mpi_library(tmp_path: Path) -> None:
    """Whatever the transport: with an mpi4py that cannot be imported, as on a machine without MPI."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    done = alone("fine", "--transport", "mpi", PYTHONPATH=f"{tmp_path}:{clean_environment()['PYTHONPATH']}")
    assert (done.code, done.errors) == (0, [])
    assert "sum 1 over serial" in done.out


@needs_mpirun
def test_mpirun_without_mpi4py_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    environ = clean_environment({"PYTHONPATH": f"{tmp_path}:{clean_environment()['PYTHONPATH']}"})
    done = mpirun(2, JOB, "fine", environ=environ)
    check_line(done, 2, r"openmpi started 2 ranks but mpi4py cannot be used \(libmpi.so.40.*")


def test_variables_of_another_mpi_are_an_error() -> None:
    """A launcher that says two ranks while mpi4py's own library says one: ranks that would each train alone."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "0202", strict=True)}
    check_line(alone("fine", **variables), 2, "openmpi says rank 0 of 2 but MPI .* says rank 0 of 1: .*")


@needs_mpirun
@pytest.mark.slow
def test_a_busy_rank_may_take_longer_than_the_time_to_arrive(tmp_path: Path) -> None:
    """Ranks must find each other soon; afterwards rank 0 may write for long while the others wait."""
    script = tmp_path / "busy.py"
    script.write_text(
        "import os, time, tiledseg.comm.rendezvous as rendezvous\n"
        "from datetime import timedelta\n"
        "from tiledseg.comm.launch import detect\n"
        "from tiledseg.comm.session import leave, open_mesh\n"
        "from mpi4py import MPI\n"
        "import torch.distributed\n"
        "MPI.COMM_WORLD.Barrier()\n"  # imports may take one of them longer than that
        "rendezvous.arrival_timeout = lambda size: timedelta(seconds=4)\n"
        "mesh = open_mesh(detect(os.environ), os.environ)\n"
        "mesh.communicator.barrier()\n"
        "time.sleep(6 * mesh.rank)\n"
        "mesh.communicator.barrier()\n"
        "mesh.communicator.close()\n"
        "leave(0)\n"
    )
    done = mpirun(2, str(script))
    assert done.code == 0, done.err


@needs_torchrun
@pytest.mark.slow
def test_torchrun() -> None:
    """torchrun prints its own summary and turns every code into 1; the rank's message stands before it."""
    command = [str(TORCHRUN), "--nproc-per-node", "2", "--master-port", free_port(), JOB]
    environ = clean_environment()
    failed = run_job([*command, "input"], environ=environ)
    assert "sum 2 over gloo" in failed.out
    check_line(replace(failed, err=failed.err.replace("Traceback", "")), 1, r"rank 1 on \S+: b.tif is truncated")


@pytest.mark.slow
def test_ranks_without_a_launcher_notice_a_killed_peer() -> None:
    """Nobody ends these ranks for them, as under srun without --kill-on-bad-exit: the closed connection must."""
    started, port = [], free_port()
    for rank in range(3):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
        environ = clean_environment({**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        command, pipes = [sys.executable, JOB, "kill in a ring"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, **pipes, text=True, env=environ))
    try:
        started[2].wait(timeout=100)
        killed = time.monotonic()
        ends = [process.communicate(timeout=60) for process in started]
        assert time.monotonic() - killed < SOON
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, 1, -9]
    for rank, (_, err) in enumerate(ends[:2]):
        assert re.search(
            rf"^error: rank {rank} on \S+: rank 2 on \S+ not answering, last in: .*; exchange failed, ",
            err,
            re.MULTILINE,
        )
