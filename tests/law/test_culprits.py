"""The law over a failure: on any number of ranks and in every mode a step that no run goes on with ends all ranks with
the same line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.law.runs import configuration, run
from tests.law.test_runs import SEVERAL, of
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig
from tiledseg.errors import TiledsegError
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.step_loss import StepLoss

PLACE = (50, 30)  # the row and column of the pixel that everything begins with
WORDS = {
    "output": "the loss is nan",
    "gradient": "the gradient is not finite",
    "large": "above train.largest_loss 1000",
}
pytestmark = pytest.mark.usefixtures("without_plots")


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A fault at the place, on the rank that has it."""
    sums = StepLoss.sums

    def summed(own: StepLoss, piece: Any, sample: Sample) -> Any:
        found, core = sums(own, piece, sample), piece.core
        if not (core.row.start <= PLACE[0] < core.row.stop and core.col.start <= PLACE[1] < core.col.stop):
            return found
        zero = piece.logits_BKHW.double().sum() * 0
        first = torch.eye(1, len(found), dtype=found.dtype)[0]
        return found + first * {"gradient": zero.sqrt(), "output": zero * float("nan"), "large": zero + 1e7}[what]

    monkeypatch.setattr(StepLoss, "sums", summed)


def fail(config: Config, mesh: Mesh) -> str:
    with pytest.raises(TiledsegError) as raised:
        run(config, mesh)
    assert is_agreed(raised.value), "rank 0 alone says it"
    assert len(set(mesh.communicator.gather_objects(str(raised.value)))) == 1
    return str(raised.value)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WORDS)
def test_all_ranks_end(shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    mesh = meshes["gloo"]
    plant(monkeypatch, what)
    ways = [{}, *([{"halo": "exchange"}, {"halo": "layer"}, {"stages": 2}] if mesh.size > 1 else [])]
    for number, way in enumerate(ways):
        keys = {"train.largest_loss": 1000.0, "parallel": ParallelConfig(**way)}
        said = fail(configuration(shared, f"{what}-{number}", keys), mesh)
        assert "at step 1" in said, said
        assert WORDS[what] in said, f"{way}: {said}"


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_loss_of_ratios_and_a_norm_over_the_step(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums are those of all ranks: nobody waits for a rank that has come to its end."""
    mesh = meshes["gloo"]
    plant(monkeypatch, "gradient")
    fail(configuration(shared, "ratios", {"train.loss": "dice", "train.tiles_per_step": 3}), mesh)
    keys = {**SEVERAL, "model.norm": "batch", "tiling.grid": 1, "train.loss": "dice", "memory.blocks": 2}
    fail(of(shared, "together", {**keys, "train.images_per_step": 3}), mesh)
