"""Scaling studies: efficiencies that add up, and what limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.search.test_search import SLOW_LINKS, question
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.plan import main, plan
from tiledseg.planning.answer.search import parse_range, scaling
from tiledseg.planning.search import search


@pytest.mark.parametrize("text", ["64", "64:32", "0:8", "a:b", "1:99999999", "4:4"])
def test_numbers_double_up_to_the_last_and_other_words_are_refused(text: str) -> None:
    assert parse_range("64:1536") == (64, 128, 256, 512, 1024, 1536)
    with pytest.raises(ConfigError, match=f"--scaling is '{text}'; give"):
        parse_range(text)


def test_strong_scaling_is_the_best_of_one_mode_and_weak_scaling_keeps_a_ranks_work() -> None:
    studies = scaling(question(1, images=2), (2, 4, 8), 1)
    strong, weak = studies["strong"], studies["weak"]
    mode = strong[0].priced.candidate.parallel.halo
    for point in strong:
        best = search(question(point.ranks), 1, mode, 1).winner
        assert point.priced.candidate.parallel.halo == mode, "an efficiency compares a mode with itself"
        assert point.priced.plan.cost.seconds == best.plan.cost.seconds
        assert point.images == 1
        ideal = 2 * strong[0].priced.plan.cost.seconds / point.ranks
        assert point.efficiency == pytest.approx(ideal / point.priced.plan.cost.seconds)
    assert strong[0].limit is None
    assert strong[-1].efficiency < 1
    assert strong[-1].limit is not None
    assert [point.images for point in weak] == [1, 2], "of 8 ranks there would be more images than an epoch has"
    assert len({point.priced.candidate for point in weak}) == 1
    assert weak[1].priced.plan.cost.time.forward == pytest.approx(weak[0].priced.plan.cost.time.forward)
    assert 0.5 < weak[1].efficiency <= 1.0


def test_pipelines_are_looked_at_where_a_rank_cannot_hold_the_weights() -> None:
    asked = question(2, network=UNet(3, 1, base_channels=64), memory=36 << 20, grid=(3, 5))
    with pytest.raises(ConfigError, match="none of"):
        scaling(asked, (2, 4), 1)
    points = scaling(asked, (2, 4), 4)["strong"]
    assert all(point.priced.candidate.parallel.stages > 1 for point in points)
    assert points[1].priced.plan.cost.seconds < points[0].priced.plan.cost.seconds


def test_slow_links_limit_by_the_all_reduce() -> None:
    asked = question(1, machine=SLOW_LINKS, parallel=replace(question().parallel))
    assert scaling(asked, (1, 4), 1)["strong"][-1].limit == "the all-reduce"


def test_table_and_json_have_the_same_points(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--scaling 1:16 --size 600 --levels 3 --base-channels 8 --images 8 --images-per-step 1 --machine summit"
    assert main(line.split()) == 0
    table = " ".join(capsys.readouterr().out.split())
    points = plan(600, scaling="1:16", levels=3, base_channels=8, images=8, images_per_step=1, machine="summit")
    points = points["scaling"]["points"]
    assert all(f"{100 * point['efficiency']:.1f} %" in table for point in points)
    assert [point["gpus"] for point in points] == [1, 2, 4, 8, 16, 1, 2, 4, 8]
    assert points[0]["epoch_seconds"] == pytest.approx(8 * points[0]["step_seconds"], rel=1e-4)
    assert "weak scaling ends at 8 GPUs: with more GPUs a step would have more images than an epoch" in table
