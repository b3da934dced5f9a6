"""The average of the weights: by its formula over the weights of every step, and what validates and maps with it."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.crash.runs import Material, lines
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError
from tiledseg.models.network import build_modules
from tiledseg.training.optimizer import AveragedWeights
from tiledseg.training.preparation import prepare

DECAY = 0.6


def averaged(material: Material, folder: Path, epochs: int = 3, **train: Any) -> Config:
    """With running statistics: a batch norm, whose tiles are taken one by one."""
    settings = {"ema": DECAY, "checkpoint_every": 1, "keep_checkpoints": 99, **train}
    config = config_of(material, folder, **settings)
    config.train.epochs = epochs
    config.model = replace(config.model, norm="batch")
    config.parallel.exact = False
    return config


@pytest.fixture(scope="module")
def finished(material: Material) -> Path:
    assert run(averaged(material, material.root / "run")) == 0
    return material.root / "run"


def test_a_weight_of_two_names_is_its_own_again() -> None:
    """A module, a weight and a bias that are shared, and a part of one: after validation, to the last bit."""
    one = torch.nn.Conv2d(3, 3, 1)
    network = torch.nn.ModuleList([one, torch.nn.Conv2d(3, 3, 1), one, torch.nn.Conv2d(3, 2, 1)])
    network[1].weight, network[1].bias = one.weight, one.bias
    network[3].weight = torch.nn.Parameter(one.weight.data[:2])
    average = AveragedWeights(network, 0.9)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.rand_like(parameter))
    average.update(1)
    own, held = deepcopy(network.state_dict()), deepcopy(average.tensors)
    assert not torch.equal(own["0.weight"], held["0.weight"])
    with average.in_place():
        found = network.state_dict()
        assert all(torch.equal(found[name], held[name]) for name in held)
        assert all(torch.equal(average.tensors[name], own[name]) for name in held)
    found = network.state_dict()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert all(torch.equal(average.tensors[name], held[name]) for name in held)


def test_it_is_that_of_the_formula(finished: Path) -> None:
    steps = sorted((finished / "checkpoints").glob("step-*"))
    saved = find_checkpoint(finished).saved
    average = {name: tensor.double() for name, tensor in build_modules(saved.network, 3).state_dict().items()}
    for number, path in enumerate(steps, start=1):
        decay = min(DECAY, (1 + number) / (10 + number))
        weights, found = load_file(path / "model.safetensors"), load_file(path / "average.safetensors")
        for name, tensor in weights.items():
            counts = not tensor.is_floating_point()
            average[name] = tensor if counts else decay * average[name] + (1 - decay) * tensor
            torch.testing.assert_close(found[name], average[name], rtol=1e-12, atol=1e-14)
    assert number == 9
    assert any(name.endswith("running_var") for name in average)
    assert not any(torch.equal(weights[name], found[name]) for name in average if name.endswith(".weight"))


def test_training_is_that_without(material: Material, finished: Path, tmp_path: Path) -> None:
    """Losses and weights to the last bit; validations differ."""
    assert run(averaged(material, tmp_path / "run", ema=0.0)) == 0
    assert not (find_checkpoint(tmp_path / "run").path / "average.safetensors").exists()
    names = [find_checkpoint(folder).path / "model.safetensors" for folder in (finished, tmp_path / "run")]
    assert names[0].read_bytes() == names[1].read_bytes()
    mine, theirs = (lines(folder) for folder in (finished, tmp_path / "run"))
    assert [line["loss"] for line in mine if "loss" in line] == [line["loss"] for line in theirs if "loss" in line]
    assert [line["val"] for line in mine if "val" in line] != [line["val"] for line in theirs if "val" in line]


def test_a_damaged_average_is_found(finished: Path, tmp_path: Path) -> None:
    path = shutil.copytree(find_checkpoint(finished).path, tmp_path / "step-000009")
    (path / "average.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"average.safetensors does not match its checksum"):
        find_checkpoint(path)


def test_its_memory_is_planned(material: Material, tmp_path: Path) -> None:
    found = [prepare(averaged(material, tmp_path, ema=ema), 1 << 30, 1) for ema in (0.0, DECAY)]
    parameters = sum(p.numel() for p in build_modules(found[0].plan.network).parameters())
    assert found[0].question.memory - found[1].question.memory == 8 * parameters  # of float64
