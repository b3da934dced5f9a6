"""Factors of the learning rate by name, decay without norms and biases, a rate that grows with the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.crash.runs import Material, lines, train, weights
from tiledseg.architecture.unet import UNet
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.config.run import OptimizerConfig
from tiledseg.models.network import build_modules
from tiledseg.training.optimizer import build_optimizer, parameter_groups, set_learning_rate

NETWORK = UNet(2, 1, base_channels=2, norm="pixel")


def groups(**keys: Any) -> list[dict[str, Any]]:
    return parameter_groups(build_modules(NETWORK, 0).parameters_by_node(), OptimizerConfig(**keys))


def test_the_first_pattern_that_fits_decides() -> None:
    names = [name for name, _ in build_modules(NETWORK, 0).parameters_by_node()]
    found = {
        names[index]: group["factor"]
        for group in groups(lr_factors={"encoder*.weight": 0.1, "encoder*": 0.5, "head.*": 20.0})
        for index in group["indices"]
    }
    assert found.keys() == set(names)
    assert found["encoder0.conv0.weight"] == found["encoder0.norm0.weight"] == 0.1
    assert (found["encoder0.norm0.bias"], found["head.bias"], found["bottom.conv0.weight"]) == (0.5, 20.0, 1.0)


def test_each_group_steps_at_its_own_rate() -> None:
    """A step of plain SGD moves a weight by rate times factor."""
    network = build_modules(NETWORK, 0).double()
    before = {name: p.detach().clone() for name, p in network.parameters_by_node()}
    update = OptimizerConfig(name="sgd", momentum=0.0, lr_factors={"encoder*": 0.25})
    optimizer = build_optimizer(parameter_groups(network.parameters_by_node(), update), update)
    set_learning_rate(optimizer, 0.5)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in network.parameters_by_node():
        moved = before[name] - parameter.detach()
        assert torch.allclose(moved, torch.full_like(moved, 0.125 if name.startswith("encoder") else 0.5))


def test_a_frozen_run_goes_on_exactly_and_may_be_unfrozen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The optimizer's state stays with its weights, however groups order them. Frozen weights stay as they were drawn,
    are in every checkpoint, and have nothing in the optimizer; unfrozen ones start anew there."""
    material = Material.make(tmp_path)
    trained = ("--optimizer.policy", "constant", "--optimizer.weight_decay", "0.1", "--optimizer.decay_norms", "false")
    frozen = (*trained, "--optimizer.lr_factors", '{"head.weight": 5.0, "encoder*": 0, "*.bias": 0}')
    whole, halves, stages, later, none = (tmp_path / name for name in ("whole", "halves", "stages", "later", "none"))
    assert train(material, whole, *frozen, "--train.epochs", "2") == 0
    assert train(material, halves, *frozen, "--train.epochs", "1") == 0
    assert train(material, halves, *frozen, "--train.epochs", "2") == 0
    assert lines(halves) == lines(whole)
    assert weights(halves) == weights(whole)
    network, drawn = (build_modules(MATERIAL, 3).double() for _ in range(2))
    load_network(find_checkpoint(halves), network)
    names = [name for name, _ in network.parameters_by_node()]
    pairs = zip(names, network.parameters(), drawn.parameters(), strict=True)
    still = {name for name, now, then in pairs if torch.equal(now, then)}
    assert still == {name for name in names if name.startswith("encoder") or name.endswith(".bias")}
    assert gathered(halves) == {index for index, name in enumerate(names) if name not in still}
    assert train(material, halves, *trained, "--train.epochs", "3") == 0
    assert gathered(halves) == set(range(len(names)))
    assert "optimizer.lr_factors" in find_checkpoint(halves).saved.resumed[-1].changed
    assert train(material, halves, *frozen, "--train.epochs", "4") == 0
    assert gathered(halves) == {index for index, name in enumerate(names) if name not in still}
    for factors, words in (('{"*": 0}', "has 0 for all"), ('{"nothing*": 2}', "has 'nothing*'")):
        assert train(material, none, "--optimizer.lr_factors", factors) == 2
        assert f"optimizer.lr_factors {words}" in capfd.readouterr().err
    assert not none.exists()
    # Unfrozen after the last step: its checkpoint, of the run in another folder, lacks what was never gathered.
    for source, folder, epochs in ((whole, stages, "2"), (stages, later, "3")):
        newest = str(find_checkpoint(source).path)
        assert train(material, folder, *trained, "--train.resume", newest, "--train.epochs", epochs) == 0
    assert gathered(later) == set(range(len(names)))


MATERIAL = UNet(2, 1, base_channels=3, dropout=0.2, bands=3, classes=3)


def gathered(run: Path) -> set[int]:
    """The numbers of the weights for which the optimizer has gathered something."""
    return {int(key.partition(".")[0]) for key in load_file(find_checkpoint(run).path / "optimizer.safetensors")}
