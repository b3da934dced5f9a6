"""The folder of materials, made once a job, seen by all ranks."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.materials import make_broken_runs, make_broken_stores, make_materials
from tiledseg.comm.launch import detect
from tiledseg.tile import main as tile
from tiledseg.train import main as train


@pytest.fixture(scope="session")
def world() -> Any:
    """MPI's ranks where this is a job of several, else None."""
    if detect(os.environ).size == 1:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, world: Any) -> Path:
    """Rank 0's folder, with a run of two steps that all ranks have trained."""
    path: Path = tmp_path_factory.mktemp("bad_input") if world is None or world.rank == 0 else None  # type: ignore
    path = on_root(world, lambda: path)
    on_root(world, lambda: make_materials(path))
    assert train(["--config", str(path / "good.yaml")]) == 0
    on_root(world, lambda: make_broken_runs(path))
    assert tile(["--config", str(path / "good.yaml"), "--output", str(path / "good.h5")]) == 0
    on_root(world, lambda: make_broken_stores(path))
    return path


def on_root(world: Any, function: Any) -> Any:
    """What `function` gives on rank 0, on every rank, once rank 0 has done it."""
    if world is None:
        return function()
    return world.bcast(function() if world.rank == 0 else None)
