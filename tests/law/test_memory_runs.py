"""The law over runs that spare memory: under a budget, with tensors that leave it, and in blocks, the bits of runs that
keep everything; and nothing is left of what lay elsewhere."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.law.runs import changed, check_same_run, configuration, losses, run, summary
from tests.law.test_runs import halo, stages
from tests.memory.stores import LateMover
from tiledseg.comm.mesh import Mesh
from tiledseg.config.parallel import MemoryConfig
from tiledseg.config.run import Config
from tiledseg.errors import BudgetError, ConfigError
from tiledseg.memory import offload
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.pipeline import balanced_pipeline
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.walk import choice, segment_memory
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.training import preparation, start
from tiledseg.training.offloading import check_store
from tiledseg.training.preparation import Preparation

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")
SHORT = {"train.epochs": 2, "train.validate_every": 9, "train.precision": "fp32"}


def kept(shared: Path, name: str, keys: dict[str, Any]) -> Config:
    return configuration(shared, name, SHORT | keys)


def sparing(config: Config, name: str, **memory: Any) -> Config:
    run_folder = replace(config.run, output=str(Path(config.run.output).with_name(name)))
    return replace(config, memory=MemoryConfig(**memory), run=run_folder)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["norms", "split"])
def test_a_budget_changes_no_loss(name: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["mpi"]
    how = halo("layer") | {"model.norm": "batch"} if name == "norms" else stages(2, balance=[20, 29])
    whole = kept(shared, name, {"model.norm": "pixel", **how})
    prepared = Preparation(whole, 1 << 40, mesh.size)
    needed, asked = prepared.plan.memory, prepared.question
    if prepared.plan.pipeline is not None:  # of the stage that needs most
        bands, batch = prepared.plan.network.bands, prepared.plan.micro_batch
        assert batch is not None
        staged = balanced_pipeline(asked.parallel, asked.graph, bands, batch, None, None)
        needed = max(staged.case.rank_bytes(staged.balance))
    budget, expected = int(0.9 * needed), losses(run(whole, mesh))
    assert losses(run(sparing(whole, f"{name} budget", budget=f"{budget}B"), mesh)) == expected
    rebuilt = summary(shared / f"{name} budget")["rebuilt"]
    assert rebuilt["bytes"] <= budget < rebuilt["bytes_kept_all"]
    assert rebuilt["tensors"]
    if prepared.plan.pipeline is not None:  # and where whole stages are computed once more
        always = changed(sparing(whole, f"{name} always"), {"parallel.recompute": "always"})
        assert losses(run(always, mesh)) == expected
        assert summary(shared / f"{name} always")["pipeline"]["recompute"] == ["always"] * 2


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_blocks_that_a_budget_demands_give_the_losses_of_the_whole(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that nothing else meets, with running statistics over the image; nobody has asked for blocks. Of a small
    image all would be on its way to the file at once: here little is."""
    mesh = meshes["mpi"]
    monkeypatch.setattr(segment_memory, "MOST_WRITTEN", 1 << 16)
    keys = {"train.precision": "fp64", "optimizer.name": "sgd", "train.validate_every": 2}
    keys |= {"model.norm": "batch", "model.base_channels": 16, "model.levels": 2}
    whole = kept(shared, "whole", keys | halo("layer"))
    question = Preparation(whole, 1 << 40, mesh.size).question
    budget = plan_run(replace(question, blocks=BlockSettings((4, 4), in_file=True))).memory
    with pytest.raises(BudgetError):
        plan_run(replace(question, memory=budget, budgeted=True, blocks=None))
    run(whole, mesh)
    run(sparing(whole, "blocks", budget=f"{budget}B", store=str(shared)), mesh)
    check_same_run(shared / "blocks", shared / "whole", 1e-11)
    told = summary(shared / "blocks")
    assert told["blocks"]["memory"] <= budget
    assert told["blocks"]["in_file"], "the store is where they lie"
    assert told["rebuilt"] is None


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's tensors leave for the host's memory as a GPU's do, by lanes that are late."""
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setattr(start, "check_store", lambda *asked: None)
    monkeypatch.setattr(offload, "HostMover", lambda device, limit: LateMover(7, limit))


WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "read": ((2,), {"model.norm": "pixel"}, "none"),
    "layer": ((2,), halo("layer", overlap=True) | {"model.norm": "batch"}, "all"),
    "stages": ((2,), stages(2), "none"),
    "half precision": ((2,), {"train.precision": "fp16"}, "all"),
}


@pytest.mark.mpi
@pytest.mark.usefixtures("everything_moves")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ranks(*ranks)) for name, (ranks, _, _) in WAYS.items()]
)
def test_what_leaves_memory_comes_back_to_the_last_bit(name: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh, (ranks, keys, recompute) = meshes["gloo"], WAYS[name]
    if mesh.size not in ranks:
        pytest.skip(f"not for {mesh.size} ranks")
    store, before = shared / "store", set(threading.enumerate())
    mesh.on_root(lambda: store.mkdir(exist_ok=True))
    whole = kept(shared, name, keys)
    expected = losses(run(whole, mesh))
    for way, place in ((f"{name} moved", str(store)), (f"{name} beside", "host")):
        assert losses(run(sparing(whole, way, recompute=recompute, offload="all", store=place), mesh)) == expected
        figures = summary(shared / way)["offloaded"]
        assert figures["bytes_in"] > 0, "when it comes back, and so what leaves again, is a matter of time"
        assert figures["bytes_out"] > 0
        assert figures["store"] == place
    assert list(store.iterdir()) == []
    for thread in (each for each in set(threading.enumerate()) - before if not each.name.startswith("Dummy")):
        thread.join(60)
        assert not thread.is_alive(), "it ends, at most a moment after the last graph is gone"


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_what_a_budget_has_leave_changes_no_loss(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(1e15, 1e15, Machine(1e9, memory_bandwidth=1e9))
    monkeypatch.setattr(preparation, "disk_of", lambda machine: store)
    monkeypatch.setattr(choice, "LEAST", 1)
    mesh = meshes["gloo"]
    whole = kept(shared, "nothing left", halo("layer"))
    budget = int(0.8 * Preparation(whole, 1 << 40, mesh.size).plan.memory)
    left = sparing(whole, "left", budget=f"{budget}B", offload="auto", store=str(shared))
    assert losses(run(left, mesh)) == losses(run(whole, mesh))
    planned, told = Preparation(left, 1 << 40, mesh.size).plan.offloaded, summary(shared / "left")
    assert told["rebuilt"]["away"]
    assert told["rebuilt"]["bytes"] <= budget < told["rebuilt"]["bytes_kept_all"]
    assert told["offloaded"]["bytes_in"] == told["offloaded"]["bytes_out"] > 0
    assert planned is not None
    assert 0 < told["offloaded"]["peak_bytes"] <= planned.staying


@pytest.mark.parametrize(("store", "device", "remedy"), [("host", "cpu", "a folder"), ("/scratch", "cuda:0", "host")])
def test_what_has_no_way_to_its_store_is_refused(store: str, device: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"memory.store {store}, but tensors on {device} .*; give {remedy}"):
        check_store("all", store, torch.device(device))
    check_store("none", store, torch.device(device))
