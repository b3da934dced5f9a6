"""A training run whose ranks live on several hosts, started as `docs/how-to/mpi-and-nccl.md` says."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.comm.launching import MPIRUN, Done
from tests.hosts.namespaces import Host

PORT = "29400"


def by_torchrun(hosts: Sequence[Host], command: Sequence[str], ranks_each: int = 1) -> list[subprocess.Popen[str]]:
    """An agent on each host, which starts its ranks."""
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
    agent += [f"--nproc-per-node={ranks_each}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    return [
        host.start([*agent, f"--node-rank={number}", "-m", *command], _environment())
        for number, host in enumerate(hosts)
    ]


def by_hand(hosts: Sequence[Host], command: Sequence[str], **environ: str) -> list[subprocess.Popen[str]]:
    """One rank on each host, which its environment tells its place."""
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": str(len(hosts))}
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [
        host.start([sys.executable, "-m", *command], _environment() | meeting | place | {"RANK": str(rank)} | environ)
        for rank, host in enumerate(hosts)
    ]


def by_mpirun(hosts: Sequence[Host], command: Sequence[str], agent: Path) -> list[subprocess.Popen[str]]:
    """Open MPI's mpirun on the first host, a rank on each. Writes `agent`, its ssh."""
    entered = "\n".join(
        f'"{host.address}") shift; exec {shlex.join(host.enter(["sh", "-c"]))} "$*" ;;' for host in hosts
    )
    agent.write_text(f'#!/bin/sh\ncase "$1" in\n{entered}\nesac\nexit 1\n')
    agent.chmod(0o755)
    names = ",".join(host.address for host in hosts)
    launcher = [str(MPIRUN), "--prtemca", "plm_ssh_agent", str(agent), "--host", names, "-n", str(len(hosts))]
    return [hosts[0].start([*launcher, sys.executable, "-m", *command], _environment())]


def end_of(
    processes: Sequence[subprocess.Popen[str]], seconds: float, while_they_run: Callable[[], object] = lambda: None
) -> list[Done]:
    """How each one ended; subprocess.TimeoutExpired where one has not within `seconds`. None is left behind."""
    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            ends = [pool.submit(_end, process, seconds) for process in processes]
            try:
                while_they_run()
            except BaseException:
                _kill(processes)
                raise
            return [end.result() for end in ends]
    finally:
        _kill(processes)


def _end(process: subprocess.Popen[str], seconds: float) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err, time.time())


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    """TERM first: an agent of torchrun ends its ranks."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    for process in left:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _environment() -> dict[str, str]:
    return {"RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1")}
