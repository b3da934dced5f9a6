"""What whole runs in this folder start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.law.runs import write_scene
from tiledseg.comm.mesh import Mesh


@pytest.fixture(scope="module")
def small_views() -> Iterator[None]:
    """Panels of the small scene show windows of it, and all of it thinned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiledseg.training.validation.SIDE", 24)
        yield


@pytest.fixture(scope="module")
def common(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all ranks."""
    torch.set_num_threads(1)
    return Path(meshes["gloo"].communicator.broadcast_object(str(tmp_path_factory.mktemp("runs"))))


@pytest.fixture(scope="module")
def shared(meshes: dict[str, Mesh], common: Path) -> Path:
    """A folder of all ranks with a scene in it."""
    meshes["gloo"].on_root(lambda: write_scene(common))
    return common
