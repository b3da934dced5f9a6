"""Both transports, on every number of ranks: the rooms above them take them in turn where `TRANSPORTS` says."""

import pytest

from tests.conftest import SIZE
from tiledseg.comm.mesh import Mesh


@pytest.fixture(params=["gloo", "mpi"] if SIZE > 1 else ["gloo"])
def mesh(request: pytest.FixtureRequest, meshes: dict[str, Mesh]) -> Mesh:
    """The mesh of each transport in turn."""
    return meshes[request.param]
