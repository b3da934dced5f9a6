"""`plan --memory-budget`: what is rebuilt, offloaded, or computed in blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.plan import main, plan
from tiledseg.planning.answer.rebuilding import rebuilding_part
from tiledseg.planning.answer.text import Section
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.walk.choice import step_choices
from tiledseg.planning.walk.cost_model import CopyRates
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.user_files.machine import find_machine

MODEL = ("--levels", "3", "--base-channels", "8")


def part_of(asked: RunQuestion, budget: int) -> Section:
    """The part for a budget on the whole tiling of a question."""
    assert asked.grid is not None
    return rebuilding_part(asked, make_tiling(asked.shape, asked.grid, network_footprint(asked.graph)), budget)


def test_the_choice_fits() -> None:
    budget, network = 40 << 20, UNet(3, base_channels=8)
    part, text = part_of(asked_of((1000, 1000), network, (3, 3)), budget)
    assert part["choice"]["peak"] <= budget < part["kept_all"]
    assert part["kept_all"] == training_memory(network.graph(), 4, tuple(part["context"])).total
    assert part["choice"]["items"]
    assert part["store"] == "a disk of 2 GB/s out and 5 GB/s in, assumed"
    assert part["leaving"]["peak"] <= budget
    assert part["leaving"]["extra"] <= part["choice"]["extra"]
    text = " ".join(text.split())
    assert f"where everything is kept, recomputing {part['choice']['items'][0]}" in text
    assert "in blocks: at most " in text


def test_blocks_are_weighed_too() -> None:
    """Of a whole image, which a norm needs, at a budget that rebuilding does not meet."""
    given = {"levels": 3, "base_channels": 8, "norm": "instance", "memory_budget": "150MiB"}
    part = plan(1000, grid=1, **given)["rebuilding"]
    assert part["choice"] is None
    assert part["blocks"]["memory"] <= part["budget"]
    assert part["blocks"]["in_file"]


def test_an_image_that_kernels_do_not_take_goes_in_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the budget takes some; else it is refused as without a budget."""
    large = ("--size", "16384", *MODEL, "--grid", "1", "--norm", "instance", "--memory-budget")
    assert main([*large, "8GiB", "--show", "modes,rebuilding"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no mode takes a tile whole on this mesh" in text
    assert "not whole: a tensor would have more values than 2147483646, to which kernels count" in text
    assert "in blocks: at most " in text
    assert main([*large, "64MiB"]) == 2
    assert "values, but kernels count to 2147483646; use a finer grid than 1 x 1" in capsys.readouterr().err


def test_a_gpus_tensors_leave_by_the_profiles_way_to_the_host() -> None:
    """At the speed of the same profile, by which what is rebuilt is weighed too."""
    profile = replace(find_machine("summit"), host_store=CopyRates(1e15, 2e15))
    network, budget = UNet(3, base_channels=8), 80 << 20
    asked = asked_of((512, 512), network, (1, 1), machine=profile)
    part, text = part_of(asked, budget)
    assert part["store"] == "the host's memory of 1e+06 GB/s out and 2e+06 GB/s in, by the profile V100 on Summit"
    assert f"with memory.offload auto, to {part['store']}: " in " ".join(text.split())
    assert part["leaving"]["away"]
    assert part["leaving"]["peak"] <= budget
    rebuilt = step_choices(network.graph(), 4, (512, 512), 4, machine=profile).choose(budget)
    assert rebuilt is not None
    assert part["leaving"]["extra"] < part["choice"]["extra"] == rebuilt.extra
