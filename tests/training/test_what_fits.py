"""A budget that is refused, and memory that runs out, name settings that fit: each is tried by a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import Material
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError, MemoryLimitError
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import naming_a_remedy, plan_run, setting_that_fits
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.training.offloading import told_what_fits

MIB = 1 << 20
STAGES = Parallelism(stages=2, recompute=("never",) * 2, timed=False)
OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def question(memory: int, norm: str = "pixel", **given: Any) -> RunQuestion:
    asked = {"rasters": (Extent((192, 288)),), "ranks": 2, "grid": (1, 1), "budgeted": True} | given
    return RunQuestion(UNet(3, base_channels=8, norm=norm), memory=memory, **asked)


@pytest.mark.parametrize("balance", [None, (20, 29)], ids=["auto", "given"])
def test_a_refused_budget_of_stages_names_a_grid_that_fits(balance: tuple[int, ...] | None) -> None:
    asked = question(8 * MIB, parallel=replace(STAGES, balance=balance))
    with pytest.raises(BudgetError, match=r"By the plan this budget fits tiling.grid \[2,2\]$"), naming_a_remedy(asked):
        plan_run(asked)
    assert plan_run(replace(asked, grid=(2, 2))).pipeline is not None, "it fits"


def test_whole_stages_computed_once_more_are_named_where_they_suffice() -> None:
    kept = question(1 << 40, parallel=STAGES, grid=(4, 4))
    whole = replace(kept, parallel=replace(STAGES, recompute=("always",) * 2))
    assert setting_that_fits(replace(kept, grid=None), 64 * MIB) == "parallel.recompute always"
    assert plan_run(replace(whole, memory=64 * MIB, budgeted=True)).pipeline is not None, "it fits"
    assert setting_that_fits(replace(kept, grid=None), 1 * MIB) is None


def test_a_norm_over_the_image_leaves_more_ranks_or_blocks() -> None:
    network, layer = UNet(2, base_channels=4, norm="instance"), Parallelism(halo="layer")
    alone = RunQuestion(network, (Extent((192, 288)),), 1, 1 << 40, layer, grid=(4, 4), budgeted=True)
    alone = replace(alone, memory=plan_run(alone).memory * 3 // 10)
    said = r"By the plan this budget fits 2 ranks$"
    with pytest.raises(BudgetError, match=said), naming_a_remedy(alone):
        plan_run(alone)
    assert plan_run(replace(alone, ranks=2)).memory <= alone.memory
    large = question(100 * MIB, "instance", ranks=1, rasters=(Extent((1024, 1024)),))
    assert setting_that_fits(large, large.memory) == "memory.blocks auto with memory.store"
    assert setting_that_fits(replace(large, blocks=BlocksAsked(None, True, True)), 10 * MIB) is None


@pytest.mark.parametrize("parallel", [STAGES, Parallelism(halo="layer")], ids=["stages", "layer"])
def test_memory_that_runs_out_names_a_budget_that_fits(parallel: Parallelism) -> None:
    asked = question(1 << 40, parallel=parallel, budgeted=False)
    plan = plan_run(asked)
    said = r"^4096 bytes of memory were asked for, \d+ were free; "
    with pytest.raises(MemoryLimitError, match=said) as told, told_what_fits(asked, plan):
        raise RuntimeError(OOM)
    budget = re.search(r"use memory\.budget (\d+) ", str(told.value))
    assert budget is not None, str(told.value)
    plan_run(replace(asked, memory=int(budget[1]), budgeted=True))
    with pytest.raises(RuntimeError, match="something else"), told_what_fits(asked, plan):
        raise RuntimeError("something else")


def test_a_run_ends_with_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.test_memory_budget import train

    def fail(*_: object) -> float:
        raise RuntimeError(OOM)

    monkeypatch.setattr("tiledseg.execution.passes.part_passes.SerialPasses.train", fail)
    with pytest.raises(MemoryLimitError, match=r"a step was planned to take \d+ bytes; use "):
        train(Material.make(tmp_path), tmp_path / "run", "auto")


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 3)])
def test_a_refused_budget_proposes_one_grid_that_would_do(grid: tuple[int, int]) -> None:
    kept = question(1 << 40, ranks=1, grid=grid)
    asked = replace(kept, memory=plan_run(kept).memory // 4)
    with pytest.raises(BudgetError) as error, naming_a_remedy(asked):
        plan_run(asked)
    proposed = re.findall(r"grid \[(\d+),(\d+)\]", str(error.value))
    assert len(proposed) == 1
    assert plan_run(replace(asked, grid=(int(proposed[0][0]), int(proposed[0][1])))).memory <= asked.memory
