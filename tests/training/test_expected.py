"""What is said of a run's time before its first step."""

from __future__ import annotations

from typing import Any

import pytest

from tiledseg.training.run_folder.journal import expected_time

DONE: list[dict[str, Any]] = [{"step": k, "seconds": 5.0 if k < 30 else 2.0} for k in range(60)]


@pytest.mark.parametrize(
    ("planned", "looks_first", "lines", "left", "expected"),
    [
        (1.5, False, [], 100, "predicted: 1.5 s a step, 2 min for 100 steps, by the measured times of layers and"),
        (1.5, True, DONE, 100, "predicted: 2 s a step, 3 min for 100 steps"),
        (0.25, False, [], 1, "predicted: 250 ms a step, 0 s for 1 step,"),
        (
            None,
            True,
            [*DONE, {"step": 60, "val": {}}],
            90,
            "the last 20 steps took 2 s each (median): at that rate 3 min",
        ),
        (None, False, DONE[:3], 2, "the last 3 steps took 5 s each (median): at that rate 10 s for 2 steps left"),
        (None, False, [], 7, "no time is predicted for 7 steps: no rate is known before the first"),
    ],
)
def test_only_what_was_measured(
    planned: float | None, looks_first: bool, lines: list[dict[str, Any]], left: int, expected: str
) -> None:
    assert expected_time(planned, looks_first, lines, left).startswith(expected)


def test_nothing_is_left() -> None:
    assert expected_time(1.0, False, DONE, 0) == ""
