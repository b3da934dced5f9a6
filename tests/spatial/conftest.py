"""The axes of every mesh shape, kept open for a module's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import TRANSPORTS
from tests.spatial.twins import OpenAxes
from tiledseg.comm.mesh import Mesh


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch warns that `same` padding of even kernels costs a copy; here it is meant."""
    for item in items:
        if "tests/spatial" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore:Using padding='same'"))


def speaker(config: pytest.Config) -> Callable[[str], None]:
    """Prints to standard error past pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(text)
            sys.stderr.flush()

    return say


@pytest.fixture(scope="module", params=TRANSPORTS)
def opened(request: pytest.FixtureRequest, meshes: dict[str, Mesh]) -> Iterator[OpenAxes]:
    """Over each transport in turn."""
    axes = OpenAxes(meshes[request.param], speaker(request.config))
    yield axes
    axes.close()


@pytest.fixture(scope="module")
def opened_mpi(pytestconfig: pytest.Config, meshes: dict[str, Mesh]) -> Iterator[OpenAxes]:
    """Over MPI alone: for what does not depend on what carries the messages."""
    axes = OpenAxes(meshes["mpi"], speaker(pytestconfig))
    yield axes
    axes.close()
