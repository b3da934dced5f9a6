"""A machine's profile decides the grid of auto, and nothing of the result: losses in float64, maps to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.law.test_reflections import read
from tests.law.test_training_steps import configuration, losses, run, write_scene
from tests.planning.cost_model.test_profile_form import MEASURED
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, TilingConfig
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict

pytestmark = pytest.mark.usefixtures("without_plots")

SLOW_WHERE_LARGE = [[1, 8, 16, 1e9, 1e9], [1, 8, 4000, 1e6, 1e6]]


def machine(folder: Path) -> str:
    """A file of one on which large tiles take far longer, by the pixel, than small ones."""
    measured = MEASURED["measured"] | {
        "launch": 1e-9,
        "rates": {precision: {"convolution": SLOW_WHERE_LARGE} for precision in ("fp32", "fp64")},
    }
    path = folder / "machine.yaml"
    path.write_text(json.dumps(MEASURED | {"measured": measured}))
    return str(path)


def grid_of(config: Config) -> list[int]:
    summary = json.loads((Path(config.run.output) / "summary.json").read_text())
    found: list[int] = summary["grids"][0]
    return found


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_losses_and_maps_do_not_depend_on_the_grid_that_a_profile_chooses(
    meshes: dict[str, Mesh], tmp_path: Path
) -> None:
    mesh = meshes["gloo"]
    shared = Path(mesh.communicator.broadcast_object(str(tmp_path)))
    mesh.on_root(lambda: write_scene(shared))
    name = mesh.on_root(lambda: machine(shared))
    plain = configuration(shared, shared / "plain", "fp64", "sgd", None)
    plain = replace(plain, tiling=TilingConfig(), model=replace(plain.model, levels=2))
    plain = replace(plain, train=replace(plain.train, epochs=4))
    known = replace(plain, run=replace(plain.run, output=str(shared / "known")))
    known = replace(known, parallel=replace(plain.parallel, machine=name))
    expected, found = losses(run(plain, mesh)), losses(run(known, mesh))
    assert found == pytest.approx(expected, rel=1e-10)
    assert np.prod(grid_of(known)) > np.prod(grid_of(plain)), "the profile speaks for small tiles"

    mapper = checkpoint_mapper(mesh.on_root(lambda: find_checkpoint(shared / "plain")))
    for word in (None, name):
        files = [str(shared / f"map-{word is None}-{kind}.tif") for kind in ("classes", "shares")]
        request = Request(str(shared / "image.tif"), *files, verbosity=0, machine=word)
        predict(request, mapper, 1 << 30, mesh)
    mesh.communicator.barrier()
    maps = [read(shared / f"map-{alone}-shares.tif") for alone in (True, False)]
    np.testing.assert_array_equal(*maps)
