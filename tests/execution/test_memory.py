"""What a rank may plan with: its part of what it shares with others, and no more than any rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Facts, Mesh
from tiledseg.execution import memory as module
from tiledseg.execution.memory import memory_per_rank

FREE = 1000 << 20
GPUS = [Facts("a", 1, "gpu-x"), Facts("a", 1, "gpu-x"), Facts("a", 1, "gpu-y"), Facts("b", 1, "gpu-z")]
CPUS = [*[Facts("a", 1, None)] * 3, Facts("b", 1, None)]


@pytest.mark.parametrize(("facts", "device", "sharing"), [(GPUS, "cuda:0", [2, 2, 1, 1]), (CPUS, "cpu", [3, 3, 3, 1])])
def test_ranks_on_one_gpu_or_host_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, facts: list[Facts], device: str, sharing: list[int]
) -> None:
    """Whatever number each calls its GPU by, whatever the launcher says; a rank on another host has its own."""
    monkeypatch.setattr(module, "gather_facts", lambda *_: facts)
    monkeypatch.setattr(module, "_free_memory", lambda _: FREE)
    for rank, ranks in enumerate(sharing):
        launch = replace(SERIAL, rank=rank, size=len(facts), local_size=1)
        mesh = Mesh(launch, Communicator(), torch.device(device), "gloo", facts[rank].host)
        assert memory_per_rank(mesh) == int(FREE * 0.6 / ranks)


def test_all_ranks_plan_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Communicator):
        def gather_objects(self, item: Any) -> list[Any]:
            return [item, 17]

    monkeypatch.setattr(module, "gather_facts", lambda *_: [Facts("a", 1, None), Facts("b", 1, None)])
    assert memory_per_rank(Mesh(SERIAL, Two(), torch.device("cpu"), "gloo", "a")) == 17
