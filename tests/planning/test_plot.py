from __future__ import annotations

import pytest

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import SCHEDULES
from tiledseg.planning.answer.report import plan_tiling, stage_pipeline
from tiledseg.planning.run.spread import Parallelism

plot = pytest.importorskip("tiledseg.planning.answer.plot", reason="matplotlib is not installed")
Figure = pytest.importorskip("matplotlib.figure").Figure


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_step_is_drawn_as_it_was_simulated(schedule: str) -> None:
    """A bar for each computation, on its stage, from its start to its end."""
    question = asked_of((256, 256), UNet(3, base_channels=8), (1, 1))
    tiling = plan_tiling(question)
    staged = stage_pipeline(
        question, tiling, Parallelism(stages=2, micro_batches=4, schedule=schedule, recompute=("never",) * 2)
    )
    figure = plot.draw(question, tiling, staged)
    axes = next(a for a in figure.axes if a.get_ylabel() == "stage (GPU)")
    drawn = sorted(
        (round(box.y0 + 0.4), box.x0, box.x1)
        for bars in axes.collections
        for box in (path.get_extents() for path in bars.get_paths())
    )
    wanted = sorted(
        (rank, 1000 * span.start, 1000 * span.stop)
        for rank, spans in enumerate(staged.timeline().spans)
        for span in spans
    )
    assert len(drawn) == len(wanted) == 2 * 4 * (3 if schedule == "folded" else 2)
    assert [value for bar in drawn for value in bar] == pytest.approx([value for bar in wanted for value in bar])
    assert f"schedule {schedule}" in axes.get_title()
    assert len({tuple(bars.get_facecolor()[0]) for bars in axes.collections}) == (4 if schedule == "folded" else 2)
