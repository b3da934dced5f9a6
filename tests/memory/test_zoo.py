"""The law of moving tensors: every output, gradient, buffer and random number is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.memory.stores import SlowStore, offload, to_host
from tests.memory.zoo import ZOO, Tensors
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import Mover
from tiledseg.memory.offload import Offload

STEPS = 3


def same(found: Tensors, expected: Tensors) -> bool:
    assert len(found) == len(expected)
    return all(
        a.dtype == b.dtype and a.stride() == b.stride() and _equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("name", ZOO)
def test_everything_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Nothing leaves; all that can; a part; and a part through a slow store, in which reads overtake writes."""
    run = ZOO[name]
    expected = [run(step) for step in range(STEPS)]
    whole = Offload(Mover, 1 << 40, 1)
    with whole:
        assert all(same(run(step), expected[step]) for step in range(STEPS))
    assert whole.figures.bytes_out == 0
    peak = whole.figures.peak_bytes
    for budget, kind in ((0, SlowStore), (peak // 2, FileStore), (peak // 3, SlowStore)):
        moving = offload(tmp_path, budget, kind)
        with moving:
            for step in range(STEPS):
                assert same(run(step), expected[step]), f"step {step} with {budget} of {peak} bytes, {kind.__name__}"
        assert budget or moving.figures.bytes_out > 0


@pytest.mark.parametrize("name", ZOO)
def test_everything_is_the_same_by_way_of_the_host(name: str) -> None:
    """Lanes whose copies come as late as they may: what is read too early, or given back too early, is seen."""
    run = ZOO[name]
    expected = [run(step) for step in range(STEPS)]
    whole = Offload(Mover, 1 << 40, 1)
    with whole:
        run(0)
    peak = whole.figures.peak_bytes
    for seed, budget in enumerate((0, peak // 2, peak // 3)):
        moving = to_host(budget, seed)
        with moving:
            for step in range(STEPS):
                assert same(run(step), expected[step]), f"step {step} with {budget} of {peak} bytes"
        assert budget or moving.figures.bytes_out > 0


def test_the_zoo_is_large() -> None:
    assert len(ZOO) >= 40
