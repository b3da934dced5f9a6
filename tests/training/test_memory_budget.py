"""A plan under a memory budget fits or is refused; a refused budget, and memory that runs out, name a remedy."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import Material
from tests.training.test_start import config_of, run
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError, MemoryLimitError
from tiledseg.geometry.graph import KEEP, Graph
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.planning.run.pipeline import balanced_pipeline
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost_model import Machine, Prices
from tiledseg.planning.walk.mode_cost import layer_cost
from tiledseg.training.offloading import suggesting_settings

UNETS = UNet(3, base_channels=8, norm="instance"), UNet(4, base_channels=4, norm="none")


def question(network: UNet, memory: int, **given: Any) -> RunQuestion:
    asked = {"rasters": (Extent((96, 128)),), "ranks": 1, "grid": (1, 1), "memory": memory} | given
    return RunQuestion(network, **asked)


def test_what_does_not_fit_is_said_or_refused() -> None:
    assert "use a finer tiling.grid" in plan_run(question(UNETS[0], 1 << 20)).warnings[0]
    layer = question(UNETS[0], 1 << 20, budgeted=True, parallel=Parallelism(halo="layer"), ranks=2)
    with pytest.raises(BudgetError, match=r"largest block of an image needs \d+, and \d+ .* more ranks an image"):
        plan_run(layer)


@pytest.mark.parametrize(
    ("schedule", "balance", "share"), [("1f1b", None, 0.4), ("1f1b", (40, 9), 0.5), ("gpipe", (40, 9), 0.9)]
)
def test_a_plan_fits_the_memory_of_each_stage(schedule: str, balance: tuple[int, ...] | None, share: float) -> None:
    """With all micro-batches that it keeps at once, as the memory of stages by that policy says too."""
    parallel = Parallelism(stages=2, recompute=("never",) * 2, schedule=schedule, balance=balance)
    network = UNet(3, base_channels=8, norm="pixel")
    asked = question(network, 1 << 40, ranks=2, grid=(2, 2), parallel=parallel, rasters=(Extent((192, 288)),))
    budget = int(share * max(stage_bytes(asked, plan_run(asked), network.graph())))
    plan = plan_run(replace(asked, memory=budget, budgeted=True))
    assert plan.rebuilt is not None
    assert plan.rebuilt.items
    by_policy = replace(network.graph(), memory=plan.rebuilt.policy)
    assert max(stage_bytes(asked, plan, by_policy)) == pytest.approx(plan.rebuilt.peak, rel=0.01)
    assert plan.rebuilt.peak <= budget < plan.rebuilt.kept


def stage_bytes(asked: RunQuestion, plan: RunPlan, graph: Graph) -> list[int]:
    assert plan.pipeline is not None
    assert plan.micro_batch is not None
    given = replace(asked.parallel, balance=plan.pipeline.balance)
    staged = balanced_pipeline(given, graph, asked.network.bands, plan.micro_batch, None, None)
    return staged.case.rank_bytes(staged.balance)


@pytest.mark.parametrize("fusion", [1, 3])
@pytest.mark.parametrize("network", UNETS, ids=["instance", "none"])
def test_a_plan_fits_the_memory_of_all_ranks_of_an_image(network: UNet, fusion: int) -> None:
    """Their blocks differ: at the image's border there is padding in place of halo."""
    parallel = Parallelism(halo="layer", fusion=fusion)
    asked = question(network, 1 << 40, ranks=6, grid=(2, 3), parallel=parallel, rasters=(Extent((192, 288)),))
    kept = plan_run(asked)
    assert kept.rebuilt is None
    for share in (0.9, 0.75):
        budget = int(share * kept.memory)
        plan = plan_run(replace(asked, memory=budget))
        assert plan.rebuilt is not None
        assert plan.memory == plan.rebuilt.peak <= budget
        assert plan.rebuilt.kept == kept.memory
        by_policy = replace(network.graph(), memory=plan.rebuilt.policy)
        prices = Prices(by_policy, network.bands, 4, Machine(), 6)
        again = layer_cost(prices, layer_blocks(plan.tilings[0], by_policy, (2, 3), fusion), fusion)
        assert again.memory == plan.memory
    overlapped = plan_run(replace(asked, memory=budget, parallel=replace(asked.parallel, overlap=True, fusion=1)))
    assert overlapped.rebuilt is None or set(overlapped.rebuilt.policy.inside) == {KEEP}


STAGES = Parallelism(stages=2, recompute=("never",) * 2)
OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def of_two_ranks(memory: int, **given: Any) -> RunQuestion:
    asked = {"rasters": (Extent((192, 288)),), "ranks": 2, "budgeted": True} | given
    return question(UNet(3, base_channels=8, norm="pixel"), memory, **asked)


def test_a_refused_budget_of_stages_names_a_remedy() -> None:
    asked = of_two_ranks(8 << 20, parallel=STAGES)
    with pytest.raises(BudgetError, match=r"smaller tiles|a finer tiling\.grid"):
        plan_run(asked)
    assert plan_run(replace(asked, grid=(2, 2))).pipeline is not None, "it fits"


@pytest.mark.parametrize("parallel", [STAGES, Parallelism(halo="layer")], ids=["stages", "layer"])
def test_memory_that_runs_out_names_a_budget_that_fits(parallel: Parallelism) -> None:
    asked = of_two_ranks(1 << 40, parallel=parallel, budgeted=False)
    plan = plan_run(asked)
    with (
        pytest.raises(MemoryLimitError, match=r"^memory has run out; .*4096") as told,
        suggesting_settings(asked, plan),
    ):
        raise RuntimeError(OOM)
    budget = re.search(r"use memory\.budget (\d+) ", str(told.value))
    assert budget is not None, str(told.value)
    assert int(budget[1]) < plan.memory
    plan_run(replace(asked, memory=int(budget[1]), budgeted=True))
    with pytest.raises(RuntimeError, match="something else"), suggesting_settings(asked, plan):
        raise RuntimeError("something else")


def test_a_run_ends_with_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError(OOM)

    monkeypatch.setattr("tiledseg.execution.part_passes.SerialPasses.train", fail)
    with pytest.raises(MemoryLimitError, match=r"^memory has run out; a step was planned to take \d+ bytes; use "):
        run(config_of(Material.make(tmp_path), tmp_path / "run"))
