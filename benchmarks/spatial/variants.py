"""What layer mode can be told: overlap, fusion, transport. Each against thin halos (fusion 1, no overlap) over Gloo.

A job takes its variants in turn, step by step; the transports take turns job by job.
"""

from __future__ import annotations

from typing import Any

from benchmarks.launching import mpirun, run_job
from benchmarks.spatial.scaling import JOB, Effort, medians
from benchmarks.spatial.step_case import FUSED, LAYER, OVERLAPPED, StepCase, StepJob, check_losses, mesh_of, planned
from benchmarks.spread import Spread, markdown, ratios
from tiledseg.geometry.sharing.layer_windows import WHOLE

VARIANTS = (LAYER, OVERLAPPED, FUSED, StepCase("layer", 4), StepCase("layer", WHOLE))
TRANSPORTS = ("gloo", "mpi")


def measure_variants(size: int, levels: int, base_channels: int, ranks: int, effort: Effort) -> dict[str, Any]:
    """The figures as plain values for JSON. Raises TiledsegError where the losses of two variants differ."""
    jobs = {
        transport: StepJob(mesh_of(ranks), VARIANTS, size, levels, base_channels, effort.steps, transport)
        for transport in TRANSPORTS
    }
    found: dict[tuple[str, StepCase], list[dict[str, Any]]] = {(t, case): [] for t in jobs for case in VARIANTS}
    for _ in range(effort.passes):
        for transport, job in jobs.items():
            answer = run_job(mpirun(ranks, JOB, job.to_json()), effort.limit)
            for case, figures in zip(VARIANTS, answer["cases"], strict=True):
                found[transport, case].append(figures)
    names = [f"{case} over {transport}" for transport, case in found]
    worst = check_losses([figures[0]["losses"] for figures in found.values()], names)
    rows = [
        _row(jobs[transport], case, own, found[transport, LAYER], found["gloo", LAYER])
        for (transport, case), own in found.items()
    ]
    return {"ranks": ranks, "largest_difference_of_losses": worst, "rows": rows}


def _row(
    job: StepJob, case: StepCase, own: list[dict[str, Any]], thin: list[dict[str, Any]], gloo: list[dict[str, Any]]
) -> dict[str, Any]:
    seconds = medians(own, "seconds")
    spent = sum(sum(figures["seconds"]) for figures in own)
    return {
        "transport": job.transport,
        "variant": str(case),
        "seconds": Spread.of([s for figures in own for s in figures["seconds"]]).to_dict(),
        "over_thin_halos": ratios(seconds, medians(thin, "seconds")).to_dict(),
        "over_thin_halos_on_gloo": ratios(seconds, medians(gloo, "seconds")).to_dict(),
        "efficiency_E": planned(job, case)[0],
        "halo_bytes": own[0]["halo_bytes"],
        "halo_messages": own[0]["halo_messages"],
        "communication_share": sum(sum(figures["communication_seconds"]) for figures in own) / spent,
    }


def variants_table(answer: dict[str, Any]) -> str:
    head = (
        "transport",
        "variant",
        "seconds a step",
        "time over thin halos, same transport",
        "over thin halos on gloo",
        "E",
        "halo bytes",
        "messages",
        "communication share",
    )
    rows = [
        (
            row["transport"],
            row["variant"],
            Spread(**row["seconds"]),
            Spread(**row["over_thin_halos"]),
            Spread(**row["over_thin_halos_on_gloo"]),
            f"{row['efficiency_E']:.3f}",
            f"{row['halo_bytes']:,}",
            f"{row['halo_messages']:,}",
            f"{row['communication_share']:.1%}",
        )
        for row in answer["rows"]
    ]
    return markdown(head, rows)
