"""Two and four ranks on one GPU, over Gloo and over MPI: every way to spread a run against the run of one rank.

The ranks take turns on the GPU: their times say what the staging through host memory costs and nothing of scaling.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.shared_cases import references
from benchmarks.launching import mpirun, run_process
from tiledseg.scene import main as scene

# Ranks and transport of each job.
JOBS = ((4, "gloo"), (2, "mpi"), (4, "mpi"), (2, "gloo"))
JOB_SECONDS = 45.0
SMALL_JOBS = ((4, "mpi"),)


def main() -> int:
    part = begin_part(__file__)
    part.small = part.small or part.device.type == "cpu"
    work = part.work / "shared_gpu"
    work.mkdir()
    part.measure("scenes", "s", lambda: make_scenes(work, 64 if part.small else 512))
    part.measure("one rank", "s a step", lambda: references(work, part.small, part.device))
    for ranks, transport in SMALL_JOBS if part.small else JOBS:
        name = f"job of {ranks} ranks, {transport}"
        part.measure(name, "s", partial(run_cases, part, ranks, transport), needs=15)
    for transport in ("gloo",) if part.small else ("gloo", "mpi"):
        part.measure(f"killed rank, {transport}", "s until the job ended", partial(killed, part, transport), needs=15)
    return int(part.failed)


def make_scenes(work: Path, side: int) -> int:
    """Two images and their labels."""
    for i in range(2):
        files = ["--image", str(work / f"image-{i}.tif"), "--labels", str(work / f"labels-{i}.tif")]
        if scene(["--size", str(side), str(side), "--seed", str(i), *files]):
            raise RuntimeError("the scene could not be written")
    return side


def run_cases(part: Part, ranks: int, transport: str) -> float:
    """Seconds of a job, whose rank 0 writes a line a case. RuntimeError where the job ends otherwise than with 0."""
    limit = part.left if part.small else min(JOB_SECONDS, part.left)
    words = ["--out", str(part.folder), "--work", str(part.work), "--seconds", f"{limit:.0f}"]
    words += ["--small"] if part.small else []
    command = mpirun(ranks, "benchmarks.gpu.shared_gpu_job", *words, "--transport", transport)
    begun = time.perf_counter()
    done = run_process(command, limit)
    print(done.out, done.err, flush=True)
    if done.code:
        raise RuntimeError(f"ended with code {done.code}: {done.reason}")
    return time.perf_counter() - begun


def killed(part: Part, transport: str) -> dict[str, object]:
    """A rank that is killed ends the job, which says so by its code."""
    begun = time.perf_counter()
    done = run_process(mpirun(2, "benchmarks.gpu.killed_rank_job", transport), part.left)
    seconds = time.perf_counter() - begun
    last = [line for line in done.out.splitlines() if line.startswith("rank 0: sum")]
    if done.code == 0 or not last:
        raise AssertionError(f"ended with code {done.code} after {last[-1:]}: {done.err[-300:]}")
    return {"seconds": seconds, "code": done.code, "last": last[-1], "said": done.reason}


if __name__ == "__main__":
    sys.exit(main())
