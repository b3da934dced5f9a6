"""What this machine allows at all: independent serial steps side by side, against one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.launching import mpirun, run_job
from benchmarks.spread import Spread, markdown, ratios

JOB = "benchmarks.pipeline.ceiling_job"
HEAD = ("processes at once", "seconds of a step alone", "seconds side by side", "speed-up at most")


def measure_ceiling(stages: int, flags: Sequence[str], limit: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Of `stages` processes, each with the network and micro-batches of `flags`."""
    answer = run_job(mpirun(stages, JOB, *flags), limit, environment)
    alone, together = answer["alone"], answer["together"]
    return {
        "ranks": stages,
        "alone": Spread.of(alone).to_dict(),
        "together": Spread.of(together).to_dict(),
        "speed_up_at_most": ratios([stages * seconds for seconds in alone], together).to_dict(),
    }


def ceiling_table(answer: dict[str, Any]) -> str:
    spreads = [Spread(**answer[key]) for key in ("alone", "together", "speed_up_at_most")]
    return markdown(HEAD, [[answer["ranks"], *spreads]])
