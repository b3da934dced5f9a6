"""What `plan --calibrate` writes: a profile that `plan --machine` reads, with rates that follow from what was timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.commands.calibrate import base_of_training, write_profile
from tiledseg.memory.disk.rates import StoreRates
from tiledseg.plan import main
from tiledseg.planning.cost_model.layer_work import LayerWork, graph_work
from tiledseg.planning.cost_model.profile import Pass
from tiledseg.system.freed_memory import resident_bytes
from tiledseg.training.calibration import links
from tiledseg.training.calibration.layers import Case, Timed, measure_case, points
from tiledseg.training.calibration.machine import calibrate
from tiledseg.user_files.machine import find_machine

CPU = torch.device("cpu")


def test_points_give_back_the_seconds_that_were_measured() -> None:
    """A profile of nothing but one network's layers predicts each of these as it was timed."""
    case = Case(UNet(2, base_channels=8), 64)
    timed = [one._replace(forward=1e-3 * k, backward=2e-3 * k) for k, one in enumerate(measure_case(case, CPU, 1), 1)]
    assert [one.work for one in timed] == [w for w in graph_work(case.network.graph(), 4, (64, 64), 4) if w.pixels]
    alone = [one for one in timed if sum(one.work[:4] == other.work[:4] for other in timed) == 1]
    assert len(alone) > 5
    values = {
        "name": "test",
        "host": {"ranks": 1},
        "measured": {
            "flops": dict.fromkeys(("fp32", "bf16", "fp64"), 1.0),
            "bandwidth": 1.0,
            "launch": 1e-5,
            "rates": {"fp32": points(timed, 1e-5)},
        },
    }
    from tiledseg.planning.cost_model.profile_form import profile_of

    profile = profile_of("m.yaml", values)
    for one in alone:
        back = one.backward if one.work.passes else 0.0
        assert profile.passes(one.work) == Pass(pytest.approx(one.forward, rel=2e-3), pytest.approx(back, rel=2e-3))


def test_like_layers_count_together() -> None:
    work = LayerWork("pool", 8, 1.0, 100, 0, 1, 1000, 3000, 4)
    rows = points([Timed(work, 1e-3, 1e-3), Timed(work, 3e-3, 2e-3)], 0.0)
    assert rows == {"pool": [[1.0, 8.0, 100.0, 5e5, 2e6]]}


def test_the_way_to_the_hosts_memory_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GpuLanes", lambda device: device)
    monkeypatch.setattr(links, "host_rates", lambda lanes, size: StoreRates(5e10, float(size)))
    communicator = SerialCommunicator()
    mesh = Mesh(SERIAL, communicator, torch.device("cuda", 0), "serial", "here")
    assert links.measure_host_store(mesh, 7) == StoreRates(5e10, 7.0)
    monkeypatch.setattr(communicator, "gather_objects", lambda own: [own, StoreRates(6e10, 3.0), None])
    assert links.measure_host_store(mesh, 7) == StoreRates(5e10, 3.0)


def test_the_base_does_not_count_what_the_heap_keeps() -> None:
    mesh = Mesh(SERIAL, SerialCommunicator(), CPU, "serial", "here")
    clean = base_of_training(mesh)
    blocks = [bytes(100_000) for _ in range(1000)]  # each below the size that has a mapping of its own
    pin = blocks[-1]
    held = resident_bytes()
    del blocks
    assert resident_bytes() > held - 20_000_000, "freed memory lies before a block that is in use"
    assert abs(base_of_training(mesh) - clean) < 30_000_000, "of 100 MB that were freed"
    assert len(pin) == 100_000


def test_a_profile_is_written_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(SERIAL, SerialCommunicator(), CPU, "serial", "here")
    values = calibrate(mesh, "here", 123_456_789, [Case(UNet(2, base_channels=8), 16)], str(tmp_path))
    path = tmp_path / "here.yaml"
    write_profile(str(path), values)
    profile = find_machine(str(path))
    assert profile.measured
    assert profile.base == 123_456_789
    assert profile.gradient == 0, "it is a part of layers' rates"
    assert profile.disk is not None
    assert min(profile.disk) > 1e6
    assert profile.host_store is None, "ranks on cores compute in the host's memory"
    assert min(profile.update, profile.tensor, profile.launch) > 0
    assert yaml.safe_load(path.read_text()) == values
    words = ["--size", "256", "--grid", "2", "--levels", "3", "--base-channels", "8", "--format", "json"]
    capsys.readouterr()
    assert main([*words, "--machine", str(path)]) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert modes["machine"]["profile"] == "here"
    assert modes["machine"]["measured"]
    assert all(row["milliseconds"] > 0 for row in modes["costs"])
