"""The learning rate is a pure function of the step, so a resumed run has that of an uninterrupted one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiledseg.config.run import OptimizerConfig
from tiledseg.raster.samples.sampling import Position
from tiledseg.training.optimizer import Course, build_optimizer, learning_rate


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_steps_are_those_of_torch(name: str, momentum: float, dtype: torch.dtype) -> None:
    """To the last bit, also after the state has been saved and loaded."""
    config = OptimizerConfig(name=name, lr=0.1, momentum=momentum, weight_decay=0.1)
    options = {"lr": 0.1, "weight_decay": 0.1, "foreach": True, **({"momentum": momentum} if name == "sgd" else {})}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 3, 3), (5,), (1,))]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer = build_optimizer(ours, config)
    expected = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](theirs, **options)
    for step in range(6):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape, generator=generator, dtype=dtype)
            their.grad = our.grad.clone()
        optimizer.step()
        expected.step()
        if step == 2:
            state = optimizer.state_dict()
            assert state.keys() == expected.state_dict().keys()
            optimizer = build_optimizer(ours, config)
            optimizer.load_state_dict(state)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))
    for our, their in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert our.keys() == their.keys()
        assert all(
            torch.equal(torch.as_tensor(our[key]), torch.as_tensor(their[key])) for key in our if our[key] is not None
        )


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
