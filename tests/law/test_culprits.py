"""The law over a failure: on any number of ranks and in every mode a step that no run goes on with ends all of them and
names its tile, or, where ranks share an image, the block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.law.runs import configuration, run
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import TiledsegError
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.step import StepLoss

pytestmark = pytest.mark.usefixtures("without_plots")


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A fault of the loss, on the rank of pixel (50, 30)."""
    sums = StepLoss.sums

    def summed(own: StepLoss, piece: Any, sample: Sample) -> Any:
        found, (rows, cols) = sums(own, piece, sample), (piece.core.row, piece.core.col)
        if not (rows.start <= 50 < rows.stop and cols.start <= 30 < cols.stop):
            return found
        zero = piece.logits_BKHW.double().sum() * 0
        first = torch.eye(1, len(found), dtype=found.dtype)[0]
        return found + first * {"gradient": zero.sqrt(), "output": zero * float("nan"), "large": zero + 1e7}[what]

    monkeypatch.setattr(StepLoss, "sums", summed)


WORDS = {
    "output": "the loss is nan at step 1",
    "gradient": "the gradient is not finite at step 1",
    "large": "at step 1, above train.largest_loss 1000",
}


def ways(size: int) -> dict[str, ParallelConfig]:
    shared = {mode: ParallelConfig(halo=mode) for mode in ("exchange", "layer")} if size > 1 else {}
    staged = {"stages": ParallelConfig(stages=2)} if size % 2 == 0 else {}
    return {"read": ParallelConfig(), **shared, **staged}


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WORDS)
def test_every_rank_ends_with_the_cause(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    mesh = meshes["gloo"]
    plant(monkeypatch, what)
    for name, parallel in ways(mesh.size).items():
        config = configuration(shared, f"{what}-{name}", {"train.largest_loss": 1000.0, "parallel": parallel})
        with pytest.raises(TiledsegError, match=WORDS[what]) as raised:
            run(config, mesh)
        assert is_agreed(raised.value), "rank 0 alone says it"
        assert len(set(mesh.communicator.gather_objects(str(raised.value)))) == 1
        if what != "gradient":  # then all losses are finite
            rows, cols = re.findall(r"(\d+):(\d+)", str(raised.value))
            assert int(rows[0]) <= 50 < int(rows[1]), name
            assert int(cols[0]) <= 30 < int(cols[1]), name
            assert f" of {shared / 'image.tif'} have the largest" in str(raised.value)
