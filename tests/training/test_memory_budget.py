"""A run under a memory budget: the same losses and weights to the last bit, and a plan that fits or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiledseg
from tests.crash.runs import Material, weights
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import Extent, RunQuestion, plan_run

UNETS = UNet(3, base_channels=8, norm="instance"), UNet(4, base_channels=4, norm="none")


def question(network: UNet, memory: int, **given: Any) -> RunQuestion:
    return RunQuestion(network, (Extent((96, 128)),), 1, memory, grid=(1, 1), **given)


@pytest.mark.parametrize("network", UNETS, ids=["instance", "none"])
def test_a_plan_fits_the_memory(network: UNet) -> None:
    kept = plan_run(question(network, 1 << 40))
    assert kept.rebuilt is None
    for share in (0.9, 0.7):
        plan = plan_run(question(network, int(share * kept.memory)))
        assert plan.rebuilt is not None
        assert plan.memory == plan.rebuilt.peak <= share * kept.memory
        assert plan.rebuilt.kept == kept.memory
        assert plan.rebuilt.extra > 0
        assert not plan.warnings


def test_what_does_not_fit_is_said_or_refused() -> None:
    asked = question(UNETS[0], 1 << 20)
    assert "use a finer tiling.grid" in plan_run(asked).warnings[0]
    with pytest.raises(BudgetError, match=r"memory.budget is 1048576 bytes, .* needs \d+, and \d+ with all rebuilt"):
        plan_run(question(UNETS[0], 1 << 20, budgeted=True))
    with pytest.raises(BudgetError, match=r"with parallel.halo layer and with stages nothing is rebuilt"):
        plan_run(question(UNETS[0], 1 << 20, budgeted=True, parallel=Parallelism(halo="layer")))


def test_the_least_that_is_refused_with_does_fit() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_run(question(UNETS[1], 1 << 20, budgeted=True))
    least = int(str(caught.value).split(", and ")[1].split()[0])
    plan = plan_run(question(UNETS[1], least, budgeted=True))
    assert plan.rebuilt is not None
    assert plan.memory <= least


def test_a_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    material = Material.make(tmp_path)
    runs = [train(material, tmp_path / f"run{index}", budget) for index, budget in enumerate(("auto", 0.75))]
    rebuilt = [json.loads((run / "summary.json").read_text())["rebuilt"] for run in runs]
    assert rebuilt[0] is None
    assert len(rebuilt[1]["tensors"]) > 2
    assert rebuilt[1]["bytes"] <= 0.75 * rebuilt[1]["bytes_kept_all"]
    assert weights(runs[0]) == weights(runs[1])
    lines = [[line["loss"] for line in read(run / "metrics.jsonl") if "loss" in line] for run in runs]
    assert lines[0] == lines[1]


def train(material: Material, folder: Path, budget: str | float) -> Path:
    """`budget`: auto, or a share of what a step needs."""
    config = material.config()
    config["model"] = {"levels": 3, "base_channels": 8, "norm": "batch", "dropout": 0.2}
    config["tiling"] = {"grid": 1}
    config["train"] = {"epochs": 2, "seed": 3, "precision": "fp32"}
    config["run"] = {"output": str(folder), "verbosity": 0}
    if isinstance(budget, float):
        network = UNet(3, base_channels=8, norm="batch", dropout=0.2, bands=3, classes=3)
        step = plan_run(RunQuestion(network, (Extent((64, 64)),), 1, 1 << 40, grid=(1, 1)))
        config["memory"] = {"budget": int(budget * step.memory)}
    return tiledseg.train_network(config)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
