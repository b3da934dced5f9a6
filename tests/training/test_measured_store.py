"""What leaving for a store costs, measured: by ranks that share it, and by the machine's profile where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiledseg.memory.mover import StoreRates
from tiledseg.training.preparing import measured_store
from tiledseg.user_files.machine import machine_of, shipped_machines


def test_it_is_measured(tmp_path: Path) -> None:
    store = measured_store.measured_store(str(tmp_path), 1, None, "fp32")
    assert min(store.written, store.read) > 1e6
    assert min(store.speed.flops, store.speed.memory_bandwidth) > 1e7
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_a_disk_and_a_profile_says_how_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_store, "disk_rates", lambda folder, size: StoreRates(2e9, 1e9))
    machine = machine_of(shipped_machines()[0])
    assert machine is not None
    store = measured_store.measured_store("anywhere", 4, machine, "bf16")
    assert (store.written, store.read) == (5e8, 2.5e8)
    assert store.speed.flops == machine.rates["bf16"]
    assert store.speed.memory_bandwidth == machine.memory_bandwidth
    alone = measured_store.measured_store("anywhere", 1, machine, "bf16")
    assert store.waited(1 << 20, 1 << 20) == pytest.approx(4 * alone.waited(1 << 20, 1 << 20))
