"""Reports of all ranks and the speed of all-reduce over a mesh, for `doctor`."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import VERSION, CommunicationError
from tiledseg.memory.device import Stopwatch, name_of
from tiledseg.memory.device import versions as gpu_versions
from tiledseg.system.freed_memory import why_not_kept


def diagnose(mesh: Mesh, sizes: Sequence[int], repeats: int = 7) -> dict[str, Any]:
    """Return the contents of `doctor`'s page, the same on every rank: reports of all ranks, times of all-reduces of
    `sizes` bytes of float32 if there are peers, and warnings. Collective."""
    ranks = mesh.communicator.gather_objects(report_rank(mesh))
    return {
        "launcher": mesh.launch.launcher,
        "transport": mesh.transport,
        "ranks": ranks,
        "transfers": [measure_all_reduce(mesh, size, repeats) for size in sizes] if mesh.size > 1 else [],
        "warnings": find_trouble(ranks),
    }


def report_rank(mesh: Mesh, ask_mpi: bool = True) -> dict[str, Any]:
    """Report this rank's host, device, cores that it may run on, and libraries. `ask_mpi`: load MPI, in 0.05 s, to
    report its version if the job has not loaded it."""
    return {
        "rank": mesh.rank,
        "host": mesh.host,
        "local_rank": mesh.launch.local_rank,
        "device": " ".join(filter(None, (str(mesh.device), name_of(mesh.device)))),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "versions": library_versions(ask_mpi),
    }


def library_versions(ask_mpi: bool) -> dict[str, str]:
    """Return the settings that all ranks must share: versions of libraries, use of freed memory. Starts no MPI."""
    ask_mpi = ask_mpi or "mpi4py.MPI" in sys.modules
    versions = {"tiledseg": VERSION, "torch": torch.__version__, "mpi4py": "none", "python": platform.python_version()}
    versions["mpi"] = "none: for one process, or torchrun" if ask_mpi else "not used"
    with suppress(ImportError, RuntimeError):
        import mpi4py  # loads no MPI

        versions["mpi4py"] = mpi4py.__version__
        if ask_mpi:
            mpi4py.rc.initialize = False
            from mpi4py import MPI

            versions["mpi"] = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    reason = why_not_kept(os.environ)
    return versions | gpu_versions() | {"freed memory": "kept for reuse" if reason is None else f"given back: {reason}"}


def measure_all_reduce(mesh: Mesh, size: int, repeats: int) -> dict[str, float]:
    """Time the sum of `size` bytes of float32: the median on the slowest rank, after two warm-up sums.

    `bus_bytes_per_second` is bytes / seconds times 2 (P-1) / P, the least that each of P ranks must send and receive:
    comparable with the network's rate for any P. Collective. Raises CommunicationError for a wrong sum.
    """
    count = max(1, size // 4)
    seconds = []
    for _ in range(repeats + 2):
        x = torch.full((count,), float(mesh.rank + 1), device=mesh.device)
        mesh.communicator.barrier()
        watch = Stopwatch(mesh.device)
        with watch.running():
            mesh.communicator.all_reduce_sum(x).wait()
        seconds.append(watch.seconds())
        expected = mesh.size * (mesh.size + 1) / 2
        if not bool((x == expected).all()):
            raise CommunicationError(f"the sum of {count} values over {mesh.size} ranks is {x.max()}, not {expected}")
    slowest = max(mesh.communicator.gather_objects(statistics.median(seconds[2:])))
    rate = count * 4 / slowest
    bus = rate * 2 * (mesh.size - 1) / mesh.size
    return {"bytes": count * 4, "seconds": slowest, "bytes_per_second": rate, "bus_bytes_per_second": bus}


def find_trouble(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each likely mistake: versions that differ, more threads than cores. Pure."""
    trouble = []
    for name in ranks[0]["versions"]:
        found = {report["versions"].get(name, "none"): report["rank"] for report in reversed(ranks)}
        if len(found) > 1:
            where = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(found.items()))
            trouble.append(f"{name} differs between ranks: {where}")
    for host in dict.fromkeys(report["host"] for report in ranks):
        here = [report for report in ranks if report["host"] == host]
        threads, cores = sum(report["threads"] for report in here), max(report["cores"] for report in here)
        if len(here) > 1 and all(report["cores"] == cores for report in here) and threads > cores:
            trouble.append(f"{host}: {len(here)} ranks run {threads} threads on {cores} cores: lower one of them")
    return trouble
