"""What a rank may plan with: its part of what it shares with others, and no more than any rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Facts, Mesh
from tiledseg.execution import memory as module
from tiledseg.execution.memory import memory_per_rank, ranks_sharing

FREE = 1000 << 20


def planned(monkeypatch: pytest.MonkeyPatch, facts: list[Facts], rank: int, device: str = "cuda:0") -> int:
    """Of one rank among those of `facts`, before the least of all is taken: the communicator is one rank's."""
    monkeypatch.setattr(module, "gather_facts", lambda *_: facts)
    monkeypatch.setattr(module, "_free_memory", lambda _: FREE)
    launch = replace(SERIAL, rank=rank, size=len(facts), local_size=1)
    return memory_per_rank(Mesh(launch, SerialCommunicator(), torch.device(device), "gloo", facts[rank].host))


def test_ranks_on_one_gpu_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number each calls it by, and not those of another host, whose GPU has a name of its own."""
    facts = [Facts("a", 1, "gpu-x"), Facts("a", 1, "gpu-x"), Facts("a", 1, "gpu-y"), Facts("b", 1, "gpu-z")]
    found = [
        planned(monkeypatch, facts, rank, device)
        for rank, device in enumerate(("cuda:0", "cuda:1", "cuda:0", "cuda:0"))
    ]
    assert found == [int(FREE * 0.6 / sharing) for sharing in (2, 2, 1, 1)]


def test_ranks_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher does not say how many there are."""
    facts = [Facts("a", 1, None)] * 3 + [Facts("b", 1, None)]
    assert [planned(monkeypatch, facts, rank, "cpu") for rank in (0, 3)] == [int(FREE * 0.6 / 3), int(FREE * 0.6)]


def test_ranks_share_a_way_to_their_host_where_they_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one visible GPU a rank each has a way of its own, though each calls its GPU the first; a disk they share."""
    facts = {"cuda": [Facts("a", 1, f"gpu-{k}") for k in range(4)], "cpu": [Facts("a", 1, None)] * 4}
    monkeypatch.setattr(module, "gather_facts", lambda communicator, device, host: facts[device.type])
    mesh = Mesh(replace(SERIAL, rank=2, size=4, local_size=4), SerialCommunicator(), torch.device("cuda:0"), "mpi", "a")
    assert [ranks_sharing(mesh, torch.device(name)) for name in ("cuda:0", "cpu")] == [1, 4]


def test_all_ranks_plan_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(SerialCommunicator):
        def gather_objects(self, item: Any) -> list[Any]:
            return [item, 17]

    monkeypatch.setattr(module, "gather_facts", lambda *_: [Facts("a", 1, None), Facts("b", 1, None)])
    assert memory_per_rank(Mesh(SERIAL, Two(), torch.device("cpu"), "gloo", "a")) == 17
