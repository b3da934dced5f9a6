"""fp16: the loss has a scale; a step whose gradient overflows is left out. `test_runs.py` has it on ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.law.cases import one_rank
from tests.law.runs import configuration, losses, run
from tests.law.test_runs import FP16
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.saved_state import LossScale, parse_state
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config
from tiledseg.errors import TiledsegError
from tiledseg.gradients import GradientReducer

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")


def fp16(folder: Path, name: str, steps: int) -> Config:
    return configuration(folder, name, {**FP16, "train.epochs": steps})


@pytest.mark.parametrize("loss", ["cross_entropy", "dice"])
def test_the_scale_leaves_the_result(loss: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of losses that are a mean, and of ratios; with the gradient clipped at a length that the scale would pass."""
    found = []
    for scale, precision in ((2.0**10, "fp16"), (2.0**14, "fp16"), (1.0, "fp32")):
        monkeypatch.setattr("tiledseg.training.trainer.LossScale", lambda scale=scale: LossScale(scale))
        config = fp16(shared, f"{loss}-{scale:g}", 4)
        train = replace(config.train, loss=loss, precision=precision)
        found.append(run(replace(config, train=train), one_rank()))
    assert losses(found[0]) == pytest.approx(losses(found[1]), rel=1e-3)
    assert losses(found[0]) == pytest.approx(losses(found[2]), rel=1e-2)
    assert "loss_scale" not in found[2][0]


def test_a_step_left_out_moves_no_weight(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the average, nor the optimizer's state: as after no step. Checkpoints of older versions say
    nothing of a scale."""
    monkeypatch.setattr("tiledseg.training.trainer.LossScale", lambda: LossScale(2.0**20))
    config = fp16(shared, "left-out", 2)
    run(replace(config, train=replace(config.train, ema=0.5, checkpoint_every=1)), one_rank())
    first, second = (load_file(path) for path in sorted((shared / "left-out").rglob("step-*/model.safetensors")))
    assert all(torch.equal(first[name], second[name]) for name in first)
    newest = find_checkpoint(shared / "left-out")
    assert newest.saved.step == 2
    average = [load_file(path) for path in newest.path.glob("*average*.safetensors")]
    assert len(average) == 1
    assert all(torch.equal(average[0][name], second[name]) for name in average[0])
    assert not load_file(newest.path / "optimizer.safetensors")
    state = json.loads((newest.path / "manifest.json").read_text())["state"]
    assert parse_state(state).loss_scale == LossScale(2.0**18)
    del state["loss_scale"]
    assert parse_state(state).loss_scale is None


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_gradient_that_no_scale_mends_ends_the_run(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's gradient is never finite."""
    mesh, total = meshes["gloo"], GradientReducer.total
    monkeypatch.setattr("tiledseg.training.trainer.LossScale", lambda: LossScale(4.0))
    monkeypatch.setattr(GradientReducer, "total", lambda self: total(self) / (mesh.rank != mesh.size - 1))
    expected = r"gradient is not finite at step 3, of a loss of .* in fp16 with a loss scale of 1 .*: "
    with pytest.raises(TiledsegError, match=expected) as error:
        run(fp16(shared, f"no-end-{mesh.size}", 9), mesh)
    assert "\n" not in str(error.value)


def test_the_rule_is_that_of_torch() -> None:
    scale, scaler = LossScale(), torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(6100):
        finite = step not in (5, 6, 4050)
        assert scale.value == scaler.get_scale()
        weight.grad = scaler.scale(torch.tensor(0.0 if finite else math.inf))
        scaler.step(optimizer)
        scaler.update()
        scale = scale.after(finite)
    assert scale.good_steps == scaler._get_growth_tracker()
    assert scale.value == 65536 / 4 * 2 * 2 / 2 * 2
