"""Strong scaling: one training step of one network on one image, on 1, 2, 4 ranks, in each halo mode.

A pass runs a job for each number of ranks in turn; a job takes its modes in turn, step by step. Ratios are of the
medians of one pass. Memory comes from jobs of one mode each, since a process only remembers the most it has held.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.launching import mpirun, run_job
from benchmarks.spatial.step_case import (
    EXCHANGE,
    FUSED,
    LAYER,
    OVERLAPPED,
    READ,
    StepCase,
    StepJob,
    check_losses,
    mesh_of,
    planned,
)
from benchmarks.spread import Spread, markdown, ratios
from tiledseg.errors import ConfigError

JOB = "benchmarks.spatial.step_job"
CASES = (READ, EXCHANGE, LAYER, FUSED, OVERLAPPED)
ALONE = (READ, EXCHANGE, LAYER)  # one rank has nothing to fuse or to overlap
Key = tuple[int, StepCase]


@dataclass(frozen=True)
class Effort:
    """How much to measure: `passes` over all jobs, `steps` timed in each, `limit` seconds a job."""

    passes: int
    steps: int
    limit: float

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ConfigError(f"--passes is {self.passes}; give at least 1")


def measure_scaling(size: int, levels: int, base_channels: int, ranks: Sequence[int], effort: Effort) -> dict[str, Any]:
    """The figures as plain values for JSON. Raises TiledsegError where the losses of two cases differ."""
    jobs = {
        n: StepJob(mesh_of(n), ALONE if n == 1 else CASES, size, levels, base_channels, effort.steps)
        for n in sorted({1, *ranks})
    }
    found: dict[Key, list[dict[str, Any]]] = {(n, case): [] for n, job in jobs.items() for case in job.cases}
    cores = min(os.cpu_count() or 1, max(ranks))
    together: list[float] = []
    for _ in range(effort.passes):
        together.append(_side_by_side(jobs[1], cores, effort))
        for n, job in jobs.items():
            answer = run_job(mpirun(n, JOB, job.to_json()), effort.limit)
            for case, figures in zip(job.cases, answer["cases"], strict=True):
                found[n, case].append(figures)
    names = [f"{case} on {n} ranks" for n, case in found]
    worst = check_losses([figures[0]["losses"] for figures in found.values()], names)
    memory = {(n, case): _memory(jobs[n], case, effort) for n, case in found}
    rows = [_row(jobs[n], case, found, memory[n, case]) for n, case in found]
    alone = [cores * seconds for seconds in medians(found[1, READ], "seconds")]
    ceiling = {"processes": cores, "speed_up": ratios(alone, together).to_dict()}
    return {"largest_difference_of_losses": worst, "cores": os.cpu_count(), "ceiling": ceiling, "rows": rows}


def _side_by_side(job: StepJob, processes: int, effort: Effort) -> float:
    """The median seconds of a step of one rank where as many others, who have nothing to do with it, run beside it."""
    with ThreadPoolExecutor(processes) as pool:
        command = mpirun(1, JOB, job.to_json())
        answers = pool.map(lambda _: run_job(command, effort.limit), range(processes))
        return statistics.mean(statistics.median(answer["cases"][0]["seconds"]) for answer in answers)


def _memory(job: StepJob, case: StepCase, effort: Effort) -> tuple[int, int]:
    """(peak bytes of the largest rank, what it held before it had a network)."""
    answer = run_job(mpirun(job.ranks, JOB, replace(job, cases=(case,), steps=1).to_json()), effort.limit)
    return answer["cases"][0]["memory_bytes"], answer["memory_before_bytes"]


def _row(
    job: StepJob, case: StepCase, found: dict[Key, list[dict[str, Any]]], memory: tuple[int, int]
) -> dict[str, Any]:
    own, base = found[job.ranks, case], found[1, READ]
    efficiency, planned_bytes, planned_messages = planned(job, case)
    seconds = medians(own, "seconds")
    spent = sum(sum(figures["seconds"]) for figures in own)
    return {
        "ranks": job.ranks,
        "mesh": job.mesh,
        "mode": str(case),
        "seconds": Spread.of([s for figures in own for s in figures["seconds"]]).to_dict(),
        "speed_up": ratios(medians(base, "seconds"), seconds).to_dict(),
        "cpu_seconds_over_one_rank": ratios(medians(own, "cpu_seconds"), medians(base, "cpu_seconds")).to_dict(),
        "efficiency_E": efficiency,
        "halo_bytes": own[0]["halo_bytes"],
        "halo_messages": own[0]["halo_messages"],
        "planned": {"halo_bytes": planned_bytes, "halo_messages": planned_messages},
        "communication_share": sum(sum(figures["communication_seconds"]) for figures in own) / spent,
        "memory_bytes": memory[0],
        "memory_before_bytes": memory[1],
    }


def medians(found: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The median of each pass."""
    return [statistics.median(figures[key]) for figures in found]


def scaling_table(answer: dict[str, Any]) -> str:
    head = (
        "ranks",
        "mode",
        "seconds a step",
        "speed-up over 1 rank",
        "CPU time of all ranks over that of 1",
        "E",
        "halo bytes a step",
        "messages",
        "communication share",
        "peak memory a rank, MiB (before the network)",
    )
    return markdown(head, [_cells(row) for row in answer["rows"]])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['ranks']}",
        row["mode"],
        str(Spread(**row["seconds"])),
        str(Spread(**row["speed_up"])),
        str(Spread(**row["cpu_seconds_over_one_rank"])),
        f"{row['efficiency_E']:.3f}",
        _beside_plan(row, "halo_bytes"),
        _beside_plan(row, "halo_messages"),
        f"{row['communication_share']:.1%}",
        f"{row['memory_bytes'] / 2**20:.0f} ({row['memory_before_bytes'] / 2**20:.0f})",
    ]


def _beside_plan(row: dict[str, Any], key: str) -> str:
    measured, expected = row[key], row["planned"][key]
    return f"{measured:,}" if measured == expected else f"{measured:,} (PLANNED {expected:,})"


def efficiency_table(answer: dict[str, Any]) -> str:
    """Layer mode on n ranks against one rank on the same work: of n ranks, and of the cores that they share."""
    head = ("ranks", "layer mode", "speed-up", "of n ranks", "of the cores in use", "CPU time over 1 rank's")
    rows = []
    for row in answer["rows"]:
        if row["ranks"] > 1 and row["mode"].startswith("layer"):
            faster, n = row["speed_up"]["median"], row["ranks"]
            cores = min(n, answer["cores"])
            cpu = row["cpu_seconds_over_one_rank"]["median"]
            rows.append((n, row["mode"], f"{faster:.2f}", f"{faster / n:.0%}", f"{faster / cores:.0%}", f"{cpu:.3f}"))
    return markdown(head, rows)
