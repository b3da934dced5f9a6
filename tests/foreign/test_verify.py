"""The check at the place of use, from the front door: maps, runs, `parallelize`, `Pipeline`; it moves no number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiledseg
from tests.answers import errors_of, refuse
from tests.crash.runs import Material, step_losses
from tests.foreign.modules import LargeOnly, Sly
from tests.foreign.test_build import config, weights
from tests.small_files import write_raster
from tiledseg.cli import main
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError

LARGE = 352
SAID = "checked: the graph gives what"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bands of 0 to 10,000, beyond the sizes that tracing tries."""
    path = tmp_path_factory.mktemp("scene") / "a.tif"
    pixels_CHW = np.random.default_rng(3).integers(0, 10001, (2, LARGE, LARGE)).astype(np.uint16)
    write_raster(path, pixels_CHW)
    return path


class OfOneWhole(Sly):
    """A module that doubles images of the scene's size, and no tile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if 300 < x.shape[3] < 400 else 1)


@pytest.mark.parametrize(
    ("module", "grid", "words"),
    [
        (LargeOnly(norm=False), 1, r"LargeOnly computes what.*\(mul, tests/foreign/modules.py:\d+\) is called"),
        (OfOneWhole(norm=False), 2, rf"\(mul, \S+verify.py:\d+\) is given other numbers at 1 x {LARGE} x {LARGE}"),
    ],
)
def test_a_map_of_another_network_is_none(
    module: nn.Module, grid: int, words: str, scene: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        tiledseg.predict_raster(module, scene, tmp_path / "map.tif", grid=grid)
    assert not list(tmp_path.iterdir())
    tiledseg.predict_raster(module, scene, tmp_path / "map.tif", grid=grid, verify=False)
    assert (tmp_path / "map.tif").exists()


def test_a_map_says_what_was_compared(scene: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the command, at each way of computing; the switch is refused where it has no effect."""
    torch.save(Sly().state_dict(), tmp_path / "w.pth")
    own = ["--build", "tests.foreign.modules:Sly", "--weights", str(tmp_path / "w.pth"), "--classes", "3"]
    words = ["predict", *own, "--image", str(scene), "--tiling.grid", "1", "--verbosity", "2"]
    layer, blocks = ["--parallel.halo", "layer"], ["--memory.blocks", "2"]
    line = f"{SAID} Sly gives on {LARGE} x {LARGE} pixels, and Sly makes the same calls"
    for name, way in {"plain": [], "layer": layer, "blocks": blocks, "off": ["--no-verify"]}.items():
        way = [*words, *way, "--output", str(tmp_path / f"{name}.tif")]
        assert errors_of(lambda way=way: main(way)).count(line) == (name != "off"), name
    pixels = [(tmp_path / f"{name}.tif").read_bytes() for name in ("plain", "off")]
    assert pixels[0] == pixels[1]
    capfd.readouterr()
    for verify in (True, False):
        tiledseg.predict_raster(Sly(), scene, tmp_path / "own.tif", grid=1, verify=verify)
        assert capfd.readouterr().err.count(line) == verify
    way = ["predict", "--checkpoint", "run", "--no-verify", "--image", str(scene), "--output", "b.tif"]
    refuse(lambda: main(way), "--no-verify is given, but no --build")


@pytest.mark.usefixtures("without_plots")
def test_a_run_has_the_same_bits_with_the_check_and_without(
    material: Material, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {"build": "tests.foreign.modules:build", "arguments": {"width": 3, "norm": True}}
    runs = {}
    for verify in (True, False):
        groups = {"model": {**model, "verify": verify}, "run": {"verbosity": 2}, "tiling": {"grid": 1}}
        groups["train"] = {"tiles_per_step": 1, "augment": [{"noise": 0.1}]}
        runs[verify] = tiledseg.train_network(config(material, tmp_path / str(verify), **groups))
        assert (SAID in capfd.readouterr().err) == verify
    assert step_losses(runs[True]) == step_losses(runs[False])
    ours, theirs = weights(runs[True]), weights(runs[False])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_ranks_of_one_image_agree_that_a_module_is_another(
    meshes: dict[str, Mesh], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each on its block; where one alone sees a difference, all end with its words. The switch lets it go on."""
    ranks = meshes["gloo"].size
    x_BCHW = torch.randn(1, 2, 64 * ranks, 64)
    x_BCHW[:, :, -9:] = 100  # the last rank's
    torch.manual_seed(1)
    module = Sly(norm=False)
    spread = tiledseg.parallelize(module, (ranks, 1))
    module.sly = "pixels" if ranks == 1 else "bright"
    block_BCHW = x_BCHW[:, :, *spread.block(64 * ranks, 64).slices]
    with pytest.raises(ConfigError, match="Sly computes in training what its graph does not"):
        spread(block_BCHW)
    module.sly = ""
    capfd.readouterr()
    for _ in range(2):
        spread(block_BCHW)
    spread.eval()(block_BCHW)
    assert capfd.readouterr().err.count(SAID) == 2 * meshes["gloo"].is_root
    spread.close()
    again = tiledseg.parallelize(module, (ranks, 1), verify=False)
    module.sly = "bright"
    again(block_BCHW)
    again.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_first_stage_looks_for_all(meshes: dict[str, Mesh], capfd: pytest.CaptureFixture[str]) -> None:
    x_BCHW, target_BHW = torch.randn(2, 2, LARGE, 32), torch.zeros(2, LARGE, 32, dtype=torch.long)

    def step(module: nn.Module, **options: Any) -> torch.Tensor:
        torch.manual_seed(1)
        pipeline = tiledseg.Pipeline(module, 2, [2, 3], **options)
        try:
            return pipeline.step(x_BCHW, target_BHW, nn.functional.cross_entropy)
        finally:
            pipeline.close()

    with pytest.raises(ConfigError, match=r"LargeOnly computes in training.*\(mul, tests/foreign/modules.py"):
        step(LargeOnly(norm=False))
    torch.manual_seed(2)
    lost = step(Sly(norm=False))
    assert capfd.readouterr().err.count(SAID) == int(meshes["gloo"].is_root)
    torch.manual_seed(2)
    assert step(Sly(norm=False), verify=False) == lost
    step(LargeOnly(norm=False), verify=False)
