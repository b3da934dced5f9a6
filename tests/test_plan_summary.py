"""The first lines of `tiledseg plan`, which answer what people ask."""

from __future__ import annotations

import json
import re

import pytest

from tiledseg.plan import main

SMALL = "--size 2000 --levels 4 --base-channels 16"
PLANS = [
    "--machine h100",
    f"{SMALL} --grid 4 --gpus 64 --images 30 --machine summit",
    f"{SMALL} --grid 4 --gpus 5 --norm batch",
    f"{SMALL} --grid 2 --gpu-memory 600MiB",
    f"{SMALL} --grid 1 --norm instance --gpu-memory 1GiB",
    f"{SMALL} --grid 1 --stages 4 --machine summit",
    f"{SMALL} --grid 4 --gpu-memory 10MiB",
    "--size 16 --grid 1 --norm batch",
]


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


def summary(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    return json.loads(printed(capsys, f"{line} --format json"))["summary"]


@pytest.mark.parametrize("line", PLANS)
def test_the_first_lines_are_few_and_short(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = printed(capsys, line).splitlines()
    assert max(map(len, every)) <= 80
    lines = every[: next(at for at, text in enumerate(every) if text.startswith("more")) + 2]
    assert len(lines) <= 25
    labels = [each.split("  ")[0] for each in lines if each and not each.startswith(" ")]
    assert {"memory", "grid", "more"} <= set(labels)
    part = summary(capsys, line)
    if part["modes"]:
        assert {"halo mode", "GPUs", "step", "epoch"} <= set(labels)


@pytest.mark.parametrize("line", [*PLANS[:2], PLANS[3]])
def test_what_would_be_better_is(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A narrower precision or a finer grid, planned by itself, has the figures that were promised."""
    part = summary(capsys, line)
    assert part["better"]
    for other in part["better"]:
        kept = re.sub(r"--grid \d+", "", line)
        grid = "" if "--grid" in other["flags"] else f"--grid {part['grid'][0]} {part['grid'][1]}"
        own = summary(capsys, f"{kept} {grid} {other['flags']}")
        assert (own["memory"], own["gpus"]) == (other["memory"], other["gpus"])
        assert own["epoch_seconds"] == pytest.approx(other["epoch_seconds"])
        assert own["fits"] is not False
        assert part["fits"] is False or own["epoch_seconds"] < part["epoch_seconds"]


def test_gpus_take_images_and_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    """More GPUs than tiles take several images, fewer take several tiles each."""
    one, many, few = (summary(capsys, f"{SMALL} --grid 4 --images 30 --gpus {gpus}") for gpus in (16, 64, 5))
    assert (one["images_per_step"], many["images_per_step"], few["images_per_step"]) == (1, 4, 1)
    assert (one["gpus"], many["gpus"], few["gpus"]) == (16, 64, 4), "of 5, in mode layer on 2 x 2"
    ours = summary(capsys, f"{SMALL} --grid 4 --images 30 --gpus 64 --images-per-step 2")
    assert (ours["images_per_step"], ours["gpus"]) == (2, 32)
    assert many["epoch_seconds"] == pytest.approx(8 / 1000 * many["milliseconds"])
    assert many["epoch_seconds"] < one["epoch_seconds"] < few["epoch_seconds"]


def test_where_no_grid_fits_nothing_is_proposed_and_the_remedy_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --grid 4 --gpu-memory 10MiB"
    part = summary(capsys, line)
    assert (part["fits"], part["better"]) == (False, [])
    assert "does NOT fit; no grid does; use a smaller network" in " ".join(printed(capsys, line).split())


def test_an_epoch_is_without_reading_where_reading_has_time(capsys: pytest.CaptureFixture[str]) -> None:
    for machine, without in (("h100", True), ("cpu", False)):
        rows = printed(capsys, f"{SMALL} --grid 4 --gpus 16 --machine {machine}").splitlines()
        (epoch,) = (row for row in rows if row.startswith("epoch"))
        assert ("if all GPUs together read" in epoch) == without
