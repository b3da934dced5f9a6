"""The cost of the conversion alone: on one rank, the converted network against the one it was converted from.

Both compute the same layers on the same weights; what differs is what Python does around them. The ratio is taken pair
by pair; single pairs are disturbed by whatever else the machine does, so the spread is that of the quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.launching import python, run_job
from benchmarks.spread import Spread, markdown

BOUND = 1.02  # the law to show: below 2 %


def measure_conversions(
    sizes: Sequence[int], levels: int, base_channels: int, pairs: int, limit: float, device: str = "cpu"
) -> list[dict[str, Any]]:
    """An answer for each size of image, each from a process of its own; plain values for JSON."""
    answers = []
    for size in sizes:
        words = (*map(str, (size, levels, base_channels, pairs)), device)
        answers.append(summary(run_job(python("benchmarks.spatial.conversion_job", *words), limit)))
    return answers


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles of what the job has measured."""
    return {
        **{key: found[key] for key in ("device", "size", "pairs", "difference_of_gradients")},
        "plain_seconds": Spread.of(found["wall_seconds"]["plain"]).to_dict(),
        "wall_ratio": _quartiles(found["wall_seconds"]),
        "cpu_ratio": _quartiles(found["cpu_seconds"]),
    }


def _quartiles(seconds: dict[str, list[float]]) -> dict[str, float]:
    ratios = [c / p for p, c in zip(seconds["plain"], seconds["converted"], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": median, "lower": lower, "upper": upper}


def conversion_table(answers: Sequence[dict[str, Any]]) -> str:
    head = (
        "image",
        "device",
        "seconds a step, unconverted",
        "converted over unconverted: wall time (quartiles)",
        "CPU time (quartiles)",
        "gradients differ by",
        "below 2 %",
    )
    return markdown(head, [_cells(answer) for answer in answers])


def _cells(answer: dict[str, Any]) -> list[str]:
    wall, cpu = (
        f"{ratio['median']:.4f} ({ratio['lower']:.4f} - {ratio['upper']:.4f})"
        for ratio in (answer["wall_ratio"], answer["cpu_ratio"])
    )
    seconds = Spread(**answer["plain_seconds"])
    verdict = "yes" if answer["wall_ratio"]["median"] < BOUND else "no"
    return [
        f"{answer['size']} px",
        answer["device"],
        str(seconds),
        wall,
        cpu,
        f"{answer['difference_of_gradients']:.1e}",
        verdict,
    ]
