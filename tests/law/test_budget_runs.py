"""The law over a run under a memory budget: the same lines, bit for bit, on any ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.law.test_training_steps import configuration, losses, run
from tiledseg.comm.mesh import Mesh
from tiledseg.config.memory import MemoryConfig
from tiledseg.config.run import Config, ParallelConfig, RunConfig
from tiledseg.errors import BudgetError
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.pipeline import balanced_pipeline
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.walk import segment_memory
from tiledseg.training.preparing.preparation import prepare

pytestmark = pytest.mark.usefixtures("small_views")
SHARE = 0.9
MODES = {
    "layer": ParallelConfig(halo="layer"),
    "fused": ParallelConfig(halo="layer", fusion=2),
    "stages": ParallelConfig(stages=2, balance=[20, 29]),
}
RANKS = {"layer": (1, 2, 4), "fused": (2, 4), "stages": (2, 4)}


def in_mode(shared: Path, mode: str, name: str, memory: MemoryConfig) -> Config:
    config = configuration(shared, shared / f"{mode}-{name}", "fp32", "adamw", None)
    model = replace(config.model, norm="batch" if mode == "layer" else "pixel", base_channels=4)
    train = replace(config.train, epochs=2, validate_every=9)
    output = RunConfig(output=str(shared / f"{mode}-{name}"), verbosity=0)
    return replace(config, model=model, train=train, parallel=MODES[mode], memory=memory, run=output)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "mode",
    ["layer", pytest.param("fused", marks=pytest.mark.ranks()), pytest.param("stages", marks=pytest.mark.ranks(2))],
)
def test_losses_are_the_same_to_the_last_bit(mode: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["mpi"]
    if mesh.size not in RANKS[mode]:
        pytest.skip(f"{mode} on {mesh.size} ranks")
    config = in_mode(shared, mode, "kept", MemoryConfig())
    preparation = prepare(config, 1 << 40, mesh.size)
    budget = int(SHARE * _needed(preparation.question, preparation.plan))
    kept = run(config, mesh)
    assert len(losses(kept)) == 2
    assert losses(run(in_mode(shared, mode, "budget", MemoryConfig(budget=f"{budget}B")), mesh)) == losses(kept)
    rebuilt = json.loads((shared / f"{mode}-budget" / "summary.json").read_text())["rebuilt"]
    assert rebuilt["bytes"] <= budget < rebuilt["bytes_kept_all"]
    assert rebuilt["tensors"]
    if mode == "stages":  # and where whole stages are computed once more
        always = in_mode(shared, mode, "always", MemoryConfig())
        always.parallel = replace(always.parallel, recompute="always")
        assert losses(run(always, mesh)) == losses(kept)
        done = json.loads((shared / f"{mode}-always" / "summary.json").read_text())
        assert done["pipeline"]["settings"]["recompute"] == ["always"] * 2


def _needed(question: RunQuestion, plan: RunPlan) -> int:
    """Bytes of a step where everything is kept; of the stage that needs most."""
    if plan.pipeline is None:
        return plan.memory
    staged = balanced_pipeline(question.parallel, question.graph, plan.network.bands, plan.micro_batch, None, None)
    return max(staged.case.rank_bytes(staged.balance))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_blocks_that_a_budget_demands_give_the_losses_of_the_whole(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that nothing else meets, with running statistics over the image; nobody has asked for blocks. Of a small
    image all would be on its way to the file at once: here little is."""
    mesh = meshes["mpi"]
    monkeypatch.setattr(segment_memory, "MOST_WRITTEN", 1 << 16)

    def asked(name: str, memory: MemoryConfig) -> Config:
        config = configuration(shared, shared / f"blocks-{name}", "fp64", "sgd", None)
        model = replace(config.model, norm="batch", base_channels=16, levels=2)
        train = replace(config.train, epochs=2, validate_every=2)
        return replace(config, model=model, train=train, parallel=ParallelConfig(halo="layer"), memory=memory)

    whole = asked("whole", MemoryConfig())
    question = prepare(whole, 1 << 40, mesh.size).question
    in_blocks = replace(question, blocks=BlocksAsked((4, 4), in_file=True))
    budget = plan_run(in_blocks).memory
    with pytest.raises(BudgetError):
        plan_run(replace(question, memory=budget, budgeted=True, blocks=None))
    expected = run(whole, mesh)
    found = run(asked("budget", MemoryConfig(budget=f"{budget}B", store=str(shared))), mesh)
    assert len(losses(expected)) == 2
    assert losses(found) == pytest.approx(losses(expected), rel=1e-12)
    assert found[-1]["val"]["loss"] == pytest.approx(expected[-1]["val"]["loss"], rel=1e-12)
    summary = json.loads((shared / "blocks-budget" / "summary.json").read_text())
    assert summary["blocks"]["bytes"] <= budget
    assert summary["blocks"]["in_file"], "the store is where they lie"
    assert summary["rebuilt"] is None
