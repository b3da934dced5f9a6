"""What ranks measure of each other: with a core each, and taking turns where they are more. Serial twin: the test of a
profile of one rank, which has none of it."""

from __future__ import annotations

import os

import pytest
import torch

from tests.planning.cost_model.test_profile_form import changed
from tiledseg.comm.mesh import Mesh
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.training.calibration import exchanges, machine


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2, 4)
def test_a_profile_of_ranks_that_share_a_host(meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot deadlock: all ranks run the same steps, those outside a smaller mesh with nothing of their own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine, "_own", lambda mesh, name, ranks, cases: changed("host.ranks", max(2, ranks)))
    monkeypatch.setattr(exchanges, "SIDES", (16, 32))
    monkeypatch.setattr(exchanges, "_REPEATS", 1)
    mesh = meshes["gloo"]
    values = machine.calibrate(mesh, "here", 1000)
    profile = profile_of("here.yaml", values)
    assert profile.links["host"].latency > 0
    assert min(profile.exchange, profile.window, profile.summed, profile.norm) >= 0
    assert (profile.crowded is not None) == (mesh.size > 2)
    if profile.crowded is not None:
        assert profile.crowded.turns >= 1
        assert profile.by_the_clock(mesh.size) >= mesh.size / 2
        assert profile.of(mesh.size).links["host"].reduce_latency == profile.crowded.reduce_latency
