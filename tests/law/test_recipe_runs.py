"""The recipes of `jobs/recipes`, as they stand, on small data in the layouts that they name: on any number of ranks the
losses, weights of classes and scores of one, at the rates that the sources say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import NIGHTLY, SIZE
from tests.law.cases import one_rank
from tests.law.recipe_data import write_workplace
from tests.law.runs import check_same_run, run, summary
from tiledseg.comm.mesh import Mesh
from tiledseg.commands.options import parse_config
from tiledseg.config.run import Config
from tiledseg.raster.labels.classes import read_classes

SIZES = (2, 4) if NIGHTLY else (2,)
pytestmark = [
    pytest.mark.usefixtures("small_views", "without_plots"),
    pytest.mark.skipif(SIZE not in SIZES, reason="each run is compared with that of one rank; 2 ranks, 4 at night"),
]
SMALL: dict[str, tuple[str, ...]] = {
    "camvid-segnet": ("--model.base_channels", "8"),
    "cityscapes-gated-scnn": ("--model.base_channels", "8", "--train.windows", "{size: 32, per_step: 16, halo: none}"),
    # the rate of the paper's one worker, 0.00125, for 9 images in place of 250
    "transfer-learning": ("--model.base_channels", "8", "--train.images_per_step", "9", "--optimizer.lr", "0.00013889"),
}
"""Flags after the file, which make a recipe fit a small machine. All else is the recipe's."""
NAMES = tuple(SMALL) if NIGHTLY else ("camvid-segnet",)  # of the others `test_recipes.py` holds rates and keys by day
RATES = {
    "camvid-segnet": [1e-3, 1e-3],
    "cityscapes-gated-scnn": [0.01, 0.01 * 0.5**0.9],
    "transfer-learning": [0.00125, 0.00125],
}


@pytest.fixture(scope="module")
def workplace(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder from which all ranks run: what the recipes name lies in it."""
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path_factory.mktemp("recipes"))))
    mesh.on_root(lambda: write_workplace(folder, frames=2, thinner=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def small(name: str, output: str) -> Config:
    """The recipe with a thin network and one epoch of two steps, in float64."""
    thin = [] if name == "cityscapes-gated-scnn" else ["--model.base_channels", "4"]
    flags = [*SMALL[name], *thin, "--train.epochs", "1", "--train.validate_every", "1"]
    found = parse_config(["--config", f"jobs/recipes/{name}.yaml", *flags, "--train.precision", "fp64"], "train", "")
    data = replace(found.data, classes=read_classes(found.data.classes))
    return replace(found, data=data, run=replace(found.run, output=output, verbosity=0))


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_losses_and_scores_of_one_rank(name: str, workplace: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    found = run(small(name, f"runs/{name}"), mesh)
    mesh.on_root(lambda: run(small(name, f"runs/{name}-alone"), one_rank()))
    folder = workplace / "runs"
    check_same_run(folder / name, folder / f"{name}-alone", 1e-9)
    mine, theirs = (summary(folder / run_name) for run_name in (name, f"{name}-alone"))
    assert (mine["ranks"], theirs["ranks"]) == (mesh.size, 1)
    assert mine["parallel"]["mesh"]["replicas"] == mesh.size, "every rank has images of its own"
    assert [line["lr"] for line in found if "loss" in line] == pytest.approx(RATES[name], rel=1e-4)
