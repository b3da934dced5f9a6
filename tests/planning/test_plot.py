from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import paper_efficiency, paper_efficiency_linear
from tiledseg.geometry.tiling import make_tiling, tiling_efficiency
from tiledseg.planning.answer.report import plan_tiling

plot = pytest.importorskip("tiledseg.planning.answer.plot", reason="matplotlib is not installed")


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
def test_the_figure_shows_cores_contexts_and_the_chosen_grid(padding: str, tmp_path: Path) -> None:
    question = asked_of((2000, 3000), UNet(padding=padding), (3, 5))
    tiling = plan_tiling(question)
    raster, efficiency = plot.draw(str(tmp_path / "a.png"), question, tiling).axes
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
