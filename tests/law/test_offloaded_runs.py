"""The law over a run whose tensors leave memory for a file: the same lines, bit for bit, in every halo mode and in
stages, with recomputation too; and nothing is left of it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.law.test_training_steps import configuration, losses, run
from tests.memory.stores import LateLanes
from tiledseg.comm.mesh import Mesh
from tiledseg.config.memory import MemoryConfig
from tiledseg.config.run import Config, ParallelConfig, RunConfig
from tiledseg.errors import ConfigError
from tiledseg.memory import offload
from tiledseg.planning.memory import store as store_room
from tiledseg.planning.memory.store import Store
from tiledseg.planning.walk.items import Speed
from tiledseg.training import start
from tiledseg.training.offloading import check_store
from tiledseg.training.preparing import measured_store, preparation

pytestmark = pytest.mark.usefixtures("small_views")
MODES = {
    "read": ParallelConfig(),
    "layer": ParallelConfig(halo="layer", overlap=True),
    "exchange": ParallelConfig(halo="exchange"),
    "stages": ParallelConfig(stages=2, schedule="1f1b"),
}
SHARE = 0.8
RANKS = {"read": (1, 2), "layer": (4,), "exchange": (2,), "stages": (2,)}
RANKS_OF_A_BUDGET = {"read": (1,), "layer": (2,)}  # the choice is the same on all, and takes seconds


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)


def in_mode(shared: Path, mode: str, name: str, memory: MemoryConfig) -> Config:
    config = configuration(shared, shared / f"{mode}-{name}", "fp32", "adamw", None)
    model = replace(config.model, norm="batch" if mode == "layer" else "pixel")
    train = replace(config.train, epochs=2, validate_every=9)
    output = RunConfig(output=str(shared / f"{mode}-{name}"), verbosity=0)
    return replace(config, model=model, train=train, parallel=MODES[mode], memory=memory, run=output)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("everything_moves", "as_on_a_gpu")
def test_losses_are_the_same_to_the_last_bit(mode: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["mpi" if mode == "layer" else "gloo"]
    if mesh.size not in RANKS[mode]:
        pytest.skip(f"{mode} on {mesh.size} ranks")
    store = shared / "store"
    mesh.on_root(lambda: store.mkdir(exist_ok=True))
    before = set(threading.enumerate())
    kept = run(in_mode(shared, mode, "kept", MemoryConfig()), mesh)
    assert len(losses(kept)) == 2
    recompute = "compact" if mode == "layer" else "none"
    memory = MemoryConfig(recompute=recompute, offload="all", store=str(store))
    moved = run(in_mode(shared, mode, "moved", memory), mesh)
    assert losses(moved) == losses(kept)
    figures = json.loads((shared / f"{mode}-moved" / "summary.json").read_text())["offloaded"]
    assert figures["bytes_out"] > 0
    assert figures["bytes_in"] > 0
    assert figures["store"] == str(store)
    assert figures["steps"] > 0
    assert list(store.iterdir()) == []
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), "it ends, at most a moment after the last graph is gone"
    beside = run(in_mode(shared, mode, "beside", MemoryConfig(recompute=recompute, offload="all")), mesh)
    assert losses(beside) == losses(kept)
    there = json.loads((shared / f"{mode}-beside" / "summary.json").read_text())["offloaded"]
    assert there["bytes_in"] > 0, "when it comes back, and so what leaves again, is a matter of time"
    assert there["store"] == "host"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's tensors leave for the host's memory as a GPU's do, by lanes that are late."""
    monkeypatch.setattr(start, "check_store", lambda *asked: None)
    monkeypatch.setattr(offload, "GpuLanes", lambda device: LateLanes(7))


@pytest.fixture
def leaving_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Store(1e15, 1e15, Speed(1e9, 1e9))
    monkeypatch.setattr(measured_store, "measured_store", lambda *asked: quick)
    monkeypatch.setattr(store_room, "LEAST", 1)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["read", "layer"])
@pytest.mark.usefixtures("leaving_is_quick")
def test_what_a_budget_has_leave_changes_no_loss(mode: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["mpi" if mode == "layer" else "gloo"]
    if mesh.size not in RANKS_OF_A_BUDGET[mode]:
        pytest.skip(f"{mode} on {mesh.size} ranks")
    config = in_mode(shared, mode, "all-kept", MemoryConfig())
    budget = int(SHARE * preparation.prepare(config, 1 << 40, mesh.size).plan.memory)
    kept = run(config, mesh)
    memory = MemoryConfig(budget=f"{budget}B", offload="auto", store=str(shared))
    left = in_mode(shared, mode, "left", memory)
    assert losses(run(left, mesh)) == losses(kept)
    planned = preparation.prepare(left, 1 << 40, mesh.size).plan.offloaded
    summary = json.loads((shared / f"{mode}-left" / "summary.json").read_text())
    assert summary["rebuilt"]["away"]
    assert summary["rebuilt"]["bytes"] <= budget < summary["rebuilt"]["bytes_kept_all"]
    assert summary["offloaded"]["bytes_in"] == summary["offloaded"]["bytes_out"] > 0
    assert planned is not None
    assert 0 < summary["offloaded"]["peak_bytes"] <= planned.staying


@pytest.mark.parametrize(
    ("store", "device", "words"),
    [
        ("host", "cpu", r"memory.offload is all, but memory.store is host, the memory that is to be spared"),
        (
            "/scratch",
            "cuda",
            r"memory.store /scratch, but this machine's tensors are on cuda:0, .* use memory.store host",
        ),
    ],
)
def test_what_has_no_way_to_its_store_is_refused(store: str, device: str, words: str) -> None:
    there = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with pytest.raises(ConfigError, match=words):
        check_store("all", store, there)
    check_store("none", store, there)
