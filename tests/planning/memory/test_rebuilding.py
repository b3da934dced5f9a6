"""`plan --memory-budget`: what is rebuilt, the largest tile, and whether a finer grid is better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.plan import main, plan
from tiledseg.planning.answer.rebuilding import rebuilding_part, rebuilding_text
from tiledseg.planning.walk.choice import step_choices
from tiledseg.planning.walk.cost_model import CopyRates
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.user_files.machine import find_machine

MODEL = ("--levels", "3", "--base-channels", "8")


@pytest.fixture(scope="module")
def tight() -> dict[str, Any]:
    """The answer for a budget that keeps little of a tile."""
    part: dict[str, Any] = plan(1000, levels=3, base_channels=8, grid=3, memory_budget="40MiB")["rebuilding"]
    return part


def test_the_choice_fits_and_the_largest_tile_is_the_largest(tight: dict[str, Any]) -> None:
    part, budget, network = tight, 40 << 20, UNet(3, base_channels=8)
    assert part["choice"]["peak"] <= budget < part["kept_all"]
    assert part["kept_all"] == training_memory(network.graph(), 4, tuple(part["context"])).total
    levels = part["choice"]["levels"]
    assert sum(level["rebuilt"] for level in levels) > 0
    assert [level["name"] for level in levels][:2] == ["encoder0", "encoder1"]
    assert part["store"] == "a disk of 2 GB/s out and 5 GB/s in, assumed"
    assert part["leaving"]["peak"] <= budget
    assert part["leaving"]["extra"] <= part["choice"]["extra"]
    kept, rebuilt = part["largest"]["kept"], part["largest"]["rebuilt"]
    fits = [training_memory(network.graph(), 4, (side, side)).total <= budget for side in (kept, kept + 4)]
    assert fits == [True, False]
    assert rebuilt > 1.2 * kept
    assert step_choices(network.graph(), 4, (rebuilt, rebuilt), 4).choose(budget) is not None
    text = " ".join(rebuilding_text(part).split())
    assert ", best" in text
    assert "in blocks in a file" in text


def test_grids_are_weighed(tight: dict[str, Any]) -> None:
    """Up to the first that keeps everything."""
    rows = tight["grids"]
    assert [row["grid"][0] for row in rows] == list(range(rows[0]["grid"][0], rows[-1]["grid"][0] + 1))
    assert rows[-1]["way"] == "all kept"
    assert [row["extra"] > 0 for row in rows] == [True] * (len(rows) - 1) + [False]
    assert all(row["time"] == pytest.approx(row["efficiency"] * (1 + row["extra"]), abs=2e-4) for row in rows)


def test_blocks_are_weighed_too() -> None:
    """Of a whole image, which a norm needs, at a budget that rebuilding does not meet."""
    given = {"levels": 3, "base_channels": 8, "norm": "instance", "memory_budget": "150MiB"}
    part = plan(1000, grid=1, **given)["rebuilding"]
    assert part["choice"] is None
    assert part["blocks"]["memory"] <= part["budget"]
    assert part["largest"]["blocks"] >= 1000 > part["largest"]["rebuilt"]
    (only,) = part["grids"]
    assert only["way"] == "{} x {} blocks in a file".format(*part["blocks"]["shape"])


def test_an_image_that_kernels_do_not_take_goes_in_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the budget takes some; else it is refused as without a budget."""
    large = ("--size", "16384", *MODEL, "--grid", "1", "--norm", "instance", "--memory-budget")
    assert main([*large, "8GiB", "--show", "modes,rebuilding"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no mode takes a tile whole on this mesh" in text
    assert "not whole: a tensor would have more values than 2147483646, to which kernels count" in text
    assert "in blocks: at most " in text
    assert "blocks in a file, best" in text
    assert main([*large, "64MiB"]) == 2
    assert "values, but kernels count to 2147483646; use a finer grid than 1 x 1" in capsys.readouterr().err


def test_a_gpus_tensors_leave_by_the_profiles_way_to_the_host() -> None:
    """At the speed of the same profile, by which what is rebuilt is weighed too."""
    profile = replace(find_machine("summit"), host_store=CopyRates(1e15, 2e15))
    network, budget = UNet(3, base_channels=8), 80 << 20
    asked = asked_of((512, 512), network, (1, 1), machine=profile)
    part = rebuilding_part(asked, make_tiling((512, 512), (1, 1), network_footprint(network.graph())), budget)
    assert part["store"] == "the host's memory of 1e+06 GB/s out and 2e+06 GB/s in, by the profile V100 on Summit"
    assert f"with memory.offload auto, to {part['store']}: " in " ".join(rebuilding_text(part).split())
    assert part["leaving"]["away"]
    assert part["leaving"]["peak"] <= budget
    rebuilt = step_choices(network.graph(), 4, (512, 512), 4, machine=profile).choose(budget)
    assert rebuilt is not None
    assert part["leaving"]["extra"] < part["choice"]["extra"] == rebuilt.extra
