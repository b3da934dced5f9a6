"""Scaling studies: efficiencies that add up, and what limits."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.search.test_best import SLOW_LINKS, question
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.plan import main
from tiledseg.planning.search.best import search
from tiledseg.planning.search.scaling import parse_range, strong, weak


def test_numbers_double_up_to_the_last() -> None:
    assert parse_range("64:1536") == (64, 128, 256, 512, 1024, 1536)
    assert parse_range("1:2") == (1, 2)


@pytest.mark.parametrize("text", ["64", "64:32", "0:8", "a:b", "1:99999999", "4:4"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--scaling is '{text}'; give"):
        parse_range(text)


def test_strong_scaling_is_the_best_of_each_number() -> None:
    asked = question(1)
    points = strong(asked, (1, 2, 4), 1)
    for point in points:
        best = search(replace(asked, ranks=point.ranks), 1).winner
        assert point.priced.seconds == pytest.approx(best.seconds, rel=0.01)
        assert point.images == 1
        assert point.efficiency == pytest.approx(points[0].priced.seconds / point.ranks / point.priced.seconds)
    assert points[0].limit is None
    assert points[-1].efficiency < 1
    assert points[-1].limit is not None


@pytest.mark.usefixtures("small")
def test_pipelines_are_looked_at_where_a_rank_cannot_hold_the_weights() -> None:
    network = UNet(3, 1, base_channels=64)
    asked = question(2, network=network, memory=36 << 20, grid=(3, 5))
    with pytest.raises(ConfigError, match="none of"):
        strong(asked, (2, 4), 1)
    points = strong(asked, (2, 4), 4)
    assert all(point.priced.candidate.stages > 1 for point in points)
    assert points[1].priced.seconds < points[0].priced.seconds
    assert weak(asked, (2, 4), points[0].priced)[1].priced.candidate == points[0].priced.candidate


def test_slow_links_limit_by_the_all_reduce() -> None:
    assert strong(question(1, machine=SLOW_LINKS), (1, 4), 1)[-1].limit == "the all-reduce"


def test_weak_scaling_keeps_a_ranks_work() -> None:
    points = weak(question(2), (2, 4, 8), search(question(2), 1).winner)
    assert [point.images for point in points] == [1, 2, 4]
    assert len({point.priced.candidate for point in points}) == 1
    computing = {round(point.priced.time.forward, 12) for point in points}
    assert len(computing) == 1
    assert all(0.5 < point.efficiency <= 1.0 for point in points)


def test_a_study_compares_one_mode_with_itself_and_takes_no_more_images_than_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four GPUs would be quicker in mode `layer`: 8 % over the ideal, were two of mode `read` the measure."""
    line = "--scaling 2:8 --size 4000 --images 3 --machine v100 --format json"
    assert main(line.split()) == 0
    part = json.loads(capsys.readouterr().out)["scaling"]
    assert {point["settings"].split(",")[0] for point in part["points"]} == {"read"}
    assert all(point["efficiency"] <= 1.0001 and point["images_per_step"] <= 3 for point in part["points"])
    assert [point["gpus"] for point in part["points"] if point["scaling"] == "weak"] == [2, 4]
    assert part["quicker"]["gpus"] == 8
    assert part["quicker"]["settings"].startswith("layer")
    assert part["quicker"]["step_seconds"] < part["points"][2]["step_seconds"]


def test_table_json_and_csv_have_the_same_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.csv"
    line = "--scaling 1:4 --size 600 --levels 3 --base-channels 8 --images 8 --machine summit"
    assert main([*line.split(), "--csv", str(path), "--plot", str(tmp_path / "scaling.png")]) == 0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert main([*line.split(), "--format", "json"]) == 0
    points = json.loads(capsys.readouterr().out)["scaling"]["points"]
    rows = list(csv.DictReader(path.open()))
    assert [{key: str(value) for key, value in point.items()} for point in points] == rows
    assert all(f"{100 * point['efficiency']:.1f} %" in table for point in points)
    assert [point["gpus"] for point in points] == [1, 2, 4] * 2
    assert points[0]["epoch_seconds"] == pytest.approx(8 * points[0]["step_seconds"], rel=1e-4)


def test_the_figure_has_every_point() -> None:
    from tiledseg.planning.answer.scaling_plot import draw_scaling

    keys = "scaling", "gpus", "images_per_step", "step_seconds", "efficiency", "limit"
    rows = [
        ("strong", 1, 1, 8.0, 1.0, ""),
        ("strong", 2, 1, 4.4, 0.91, "messages"),
        ("strong", 4, 1, 2.5, 0.8, "messages"),
        ("weak", 1, 1, 8.0, 1.0, ""),
        ("weak", 2, 2, 8.0, 1.0, ""),
        ("weak", 4, 4, 8.1, 0.99, "the all-reduce"),
    ]
    part = {
        "points": [dict(zip(keys, row, strict=True)) for row in rows],
        "machine": {"profile": "V100", "measured": 1},
    }
    figure = draw_scaling(part, "small images")
    times, shares = figure.axes
    strong_times, strong_ideal, weak_times, _ = [list(line.get_ydata()) for line in times.lines]
    assert (strong_times, weak_times) == ([8.0, 4.4, 2.5], [8.0, 8.0, 8.1])
    assert strong_ideal == [8.0, 4.0, 2.0]
    assert list(shares.lines[0].get_ydata()) == [1.0, 0.91, 0.8]
    assert (times.get_xscale(), times.get_yscale(), shares.get_xscale()) == ("log", "log", "log")
    assert times.get_ylabel() == "a step (s)"
    assert "small images" in figure.get_suptitle()


def test_the_figure_cuts_no_curve_and_its_legends_name_the_curves_that_are_drawn() -> None:
    from tiledseg.planning.answer.scaling_plot import draw_scaling

    keys = "scaling", "gpus", "images_per_step", "step_seconds", "efficiency", "limit"
    rows = [("strong", 1, 1, 8.0, 1.0, ""), ("strong", 2, 1, 2.5, 1.6, "messages")]
    points = [dict(zip(keys, row, strict=True)) for row in rows]
    times, shares = draw_scaling({"points": points, "machine": {"profile": "V100", "measured": 1}}, "images").axes
    assert shares.get_ylim()[1] > 1.6
    for axes in (times, shares):
        told = [text.get_text().split(":")[0] for text in axes.get_legend().get_texts()]
        assert sorted(told) == ["ideal", "strong"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--size 600 --csv a.csv", "--csv is a.csv, but --scaling is not given"),
        ("--size 600 --scaling 1:2 --machine summit --gpus 4", "--gpus is given, but --scaling has GPUs of its own"),
        ("--size 600 --scaling 1:2 --machine summit --mesh 2", "--mesh is [2], but --scaling finds settings"),
        ("--size 600 --scaling 1:2 --machine summit --plot a.pdf", "--plot is 'a.pdf'; give a file name that ends in"),
        ("--size 600 --scaling 1:2 --machine summit --plot no/a.png", "is not a folder"),
        ("--size 600 --scaling 1:2 --machine summit --plot a.png --csv a.png", "a.png"),
    ],
)
def test_what_cannot_be_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err
