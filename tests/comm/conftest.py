"""Meshes of the running job, one a transport, opened once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tiledseg.comm.launch import detect
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.session import open_mesh


@pytest.fixture(scope="session")
def meshes() -> Iterator[dict[str, Mesh]]:
    """Gloo's and MPI's mesh over the same ranks; alone, both are serial."""
    opened = {transport: open_mesh(detect(os.environ), os.environ, transport) for transport in ("gloo", "mpi")}
    yield opened
    for mesh in opened.values():
        mesh.communicator.close()


@pytest.fixture(params=["gloo", "mpi"])
def mesh(request: pytest.FixtureRequest, meshes: dict[str, Mesh]) -> Mesh:
    """The mesh of each transport in turn."""
    return meshes[request.param]
