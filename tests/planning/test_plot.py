from __future__ import annotations

import pytest

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import SCHEDULES
from tiledseg.geometry.halo import paper_efficiency, paper_efficiency_linear
from tiledseg.geometry.tiling import make_tiling, tiling_efficiency
from tiledseg.planning.answer.report import plan_tiling, stage_pipeline
from tiledseg.planning.run.spread import Parallelism

plot = pytest.importorskip("tiledseg.planning.answer.plot", reason="matplotlib is not installed")
Figure = pytest.importorskip("matplotlib.figure").Figure


def test_curves_are_those_of_the_tilings_and_of_the_formula() -> None:
    question = asked_of((3000, 3000), UNet(), (4, 4))
    tiling = plan_tiling(question)
    curves = plot.efficiency_curves(question, tiling)
    assert [len(curve) for curve in curves.values()] == [12] * 3
    for q, (exact, paper, linear) in enumerate(zip(*curves.values(), strict=True), 1):
        assert exact == tiling_efficiency(make_tiling((3000, 3000), (q, q), tiling.footprint))
        assert paper == pytest.approx(paper_efficiency((3000, 3000), (q, q), 92))
        assert linear == pytest.approx(paper_efficiency_linear((3000, 3000), (q, q), 92))
    narrow = asked_of((100, 3000), UNet(), (1, 4))
    assert len(plot.efficiency_curves(narrow, plan_tiling(narrow))["exact"]) == 7, (
        "the curve ends as the alignment does"
    )


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_the_figure_shows_cores_contexts_and_the_chosen_grid(padding: str) -> None:
    question = asked_of((2000, 3000), UNet(padding=padding), (3, 5))
    tiling = plan_tiling(question)
    raster, efficiency = plot.draw(question, tiling).axes
    boxes = {(p.get_y(), p.get_x(), p.get_height(), p.get_width()) for p in raster.patches}
    for tile in tiling.tiles:
        core = tile.core
        assert (core.row.start, core.col.start, core.height, core.width) in boxes
    middle = tiling.tiles[7].context
    assert (middle.row.start, middle.col.start, middle.height, middle.width) in boxes
    (bottom, top), (left, right) = raster.get_ylim(), raster.get_xlim()
    assert top <= min(b[0] for b in boxes) < 2000 <= bottom
    assert left <= min(b[1] for b in boxes) < 3000 <= right
    chosen = [line for line in efficiency.lines if "chosen" in str(line.get_label())]
    assert list(chosen[0].get_ydata()) == [tiling_efficiency(tiling)]


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
