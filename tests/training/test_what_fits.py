"""A budget that is refused, and memory that runs out, name a remedy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import Material
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError, MemoryLimitError
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.training.offloading import told_what_fits

MIB = 1 << 20
STAGES = Parallelism(stages=2, recompute=("never",) * 2)
OOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def question(memory: int, norm: str = "pixel", **given: Any) -> RunQuestion:
    asked = {"rasters": (Extent((192, 288)),), "ranks": 2, "grid": (1, 1), "budgeted": True} | given
    return RunQuestion(UNet(3, base_channels=8, norm=norm), memory=memory, **asked)


@pytest.mark.parametrize("balance", [None, (20, 29)], ids=["auto", "given"])
def test_a_refused_budget_of_stages_names_a_remedy(balance: tuple[int, ...] | None) -> None:
    asked = question(8 * MIB, parallel=replace(STAGES, balance=balance))
    with pytest.raises(BudgetError, match=r"smaller tiles|a finer tiling\.grid"):
        plan_run(asked)
    assert plan_run(replace(asked, grid=(2, 2))).pipeline is not None, "it fits"


@pytest.mark.parametrize("parallel", [STAGES, Parallelism(halo="layer")], ids=["stages", "layer"])
def test_memory_that_runs_out_names_a_budget_that_fits(parallel: Parallelism) -> None:
    asked = question(1 << 40, parallel=parallel, budgeted=False)
    plan = plan_run(asked)
    with (
        pytest.raises(MemoryLimitError, match=r"^4096 bytes of memory were asked for") as told,
        told_what_fits(asked, plan),
    ):
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

    monkeypatch.setattr("tiledseg.execution.part_passes.SerialPasses.train", fail)
    with pytest.raises(MemoryLimitError, match=r"^4096 bytes of .*; a step was planned to take \d+ bytes; use "):
        train(Material.make(tmp_path), tmp_path / "run", "auto")
