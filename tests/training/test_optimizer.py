"""Learning rates of steps and of weights by name, steps of the optimizer, and the average of the weights."""

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.answers import refuse
from tests.crash.runs import Material, lines, train, weights
from tests.training.test_start import config_of, run
from tiledseg.architecture.unet import UNet
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.config.run import Config, OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.models.network import build_modules
from tiledseg.raster.samples.sampling import Position
from tiledseg.training.optimizer import (
    AveragedWeights,
    Course,
    build_optimizer,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)
from tiledseg.training.preparation import Preparation


def rates_of(config: OptimizerConfig, course: Course) -> list[float]:
    """Return the rate of every step, by the positions that follow each other."""
    position, rates = Position(0, 0), list[float]()
    while left := course.left(position):
        rates.append(learning_rate(config, len(rates), course, position))
        position = course.after(position)
        assert course.left(position) == left - 1
    assert position == (course.epochs, 0)
    return rates


@pytest.mark.parametrize("policy", ["polynomial", "cosine"])
@given(before=st.integers(1, 20), after=st.integers(1, 20), epoch=st.integers(1, 9))
def test_a_run_with_other_steps_an_epoch_goes_on_where_it_was(policy: str, before: int, after: int, epoch: int) -> None:
    config = OptimizerConfig(lr=0.5, policy=policy)
    one, other = (learning_rate(config, 99, Course(10, steps), Position(epoch, 0)) for steps in (before, after))
    assert one == pytest.approx(other)


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_steps_are_those_of_torch(name: str, momentum: float) -> None:
    """To the last bit, also after the state has been saved and loaded."""
    config = OptimizerConfig(name=name, lr=0.1, momentum=momentum, weight_decay=0.1)
    options = {"lr": 0.1, "weight_decay": 0.1, "foreach": True, **({"momentum": momentum} if name == "sgd" else {})}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in ((7, 3, 3), (5,), (1,))]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer = build_optimizer(ours, config)
    expected = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](theirs, **options)
    for step in range(6):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape, generator=generator)
            their.grad = our.grad.clone()
        optimizer.step()
        expected.step()
        if step == 2:
            state = optimizer.state_dict()
            optimizer = build_optimizer(ours, config)
            optimizer.load_state_dict(state)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", ["constant", "step", "polynomial", "cosine"])
def test_rates_are_those_of_torchs_schedulers(policy: str) -> None:
    """Twelve epochs of five steps. torch's LinearLR begins at a share that it is given: ours is that of one step."""
    per_epoch, epochs, warmup, lr = 5, 12, 10, 0.2
    asked: Any = {"name": "step", "size": 4} if policy == "step" else policy
    total, config = per_epoch * epochs, OptimizerConfig(lr=lr, policy=asked, warmup_steps=warmup)
    found = rates_of(config, Course(epochs, per_epoch))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    schedulers = torch.optim.lr_scheduler
    rising = schedulers.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    kinds = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        # After the warm-up a scheduler counts from 0; drops stand at whole epochs of the run, warm-up included.
        "step": lambda: schedulers.MultiStepLR(optimizer, [4 * per_epoch - warmup, 8 * per_epoch - warmup], 0.1),
        "polynomial": lambda: schedulers.PolynomialLR(optimizer, total - warmup, 0.9),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, total - warmup),
    }
    whole = schedulers.SequentialLR(optimizer, [rising, kinds[policy]()], [warmup])
    expected = []
    for _ in range(total):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    assert found == pytest.approx(expected, rel=1e-9)
    assert found[-1] < lr or policy == "constant"


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


def test_a_frozen_run_goes_on_exactly_and_may_be_unfrozen(tmp_path: Path) -> None:
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
        none_moves = "--optimizer.lr_factors", factors
        refuse(lambda none_moves=none_moves: train(material, none, *none_moves), f"optimizer.lr_factors {words}")
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
    found = [Preparation(averaged(material, tmp_path, ema=ema), 1 << 30, 1) for ema in (0.0, DECAY)]
    parameters = sum(p.numel() for p in build_modules(found[0].plan.network).parameters())
    assert found[0].question.memory - found[1].question.memory == 8 * parameters  # of float64
