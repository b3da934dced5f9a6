"""The axes of every mesh shape, kept open for a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import TRANSPORTS
from tests.spatial.twins import OpenAxes
from tiledseg.comm.mesh import Mesh


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch warns that `same` padding of even kernels costs a copy; here it is meant."""
    for item in items:
        if "tests/spatial" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore:Using padding='same'"))


@pytest.fixture(scope="module", params=TRANSPORTS)
def opened(request: pytest.FixtureRequest, meshes: dict[str, Mesh]) -> Iterator[OpenAxes]:
    """Over each transport in turn."""
    axes = OpenAxes(meshes[request.param])
    yield axes
    axes.close()
