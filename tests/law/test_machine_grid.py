"""A machine's profile decides the grid of auto, and nothing of the result: maps to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.law.test_reflections import read
from tests.law.test_training_steps import configuration, run, write_scene
from tests.planning.cost_model.test_machine_files import MEASURED
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.inference.request import plan_maps

pytestmark = pytest.mark.usefixtures("without_plots")


def machine(folder: Path) -> str:
    """Write a profile by which clearing the memory of a large tile takes far longer than computing it."""
    path = folder / "machine.yaml"
    path.write_text(json.dumps(MEASURED | {"figures": MEASURED["figures"] | {"launch": 1e-9, "first_touch": 1e-3}}))
    return str(path)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_maps_do_not_depend_on_the_grid_that_a_profile_chooses(meshes: dict[str, Mesh], tmp_path: Path) -> None:
    mesh = meshes["gloo"]
    shared = Path(mesh.communicator.broadcast_object(str(tmp_path)))
    mesh.on_root(lambda: write_scene(shared))
    name = mesh.on_root(lambda: machine(shared))
    plain = configuration(shared, shared / "plain", "fp64", "sgd", None)
    run(replace(plain, train=replace(plain.train, epochs=2)), mesh)
    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "plain")))
    tiles = []
    for word in (None, name):
        files = [str(shared / f"map-{word is None}-{kind}.tif") for kind in ("classes", "shares")]
        request = Request(str(shared / "image.tif"), *files, verbosity=0, machine=word)
        tiles.append(mesh.on_root(lambda request=request: len(plan_maps([request], mapper, 1 << 30, 1).tilings[0])))
        predict(request, mapper, 1 << 30, mesh)
    assert tiles[1] > tiles[0], "the profile speaks for small tiles"
    mesh.communicator.barrier()
    maps = [read(shared / f"map-{alone}-shares.tif") for alone in (True, False)]
    np.testing.assert_array_equal(*maps)
