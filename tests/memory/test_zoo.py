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
    """Nothing leaves; all that can; a part. Through a store whose reads overtake writes; and by way of the host, by
    lanes whose copies come as late as they may: what is read or given back too early is seen."""
    run = ZOO[name]
    expected = [run(step) for step in range(STEPS)]
    whole = Offload(Mover, 1 << 40, 1)
    with whole:
        assert all(same(run(step), expected[step]) for step in range(STEPS))
    assert whole.figures.bytes_out == 0
    peak = whole.figures.peak_bytes
    for budget, kind in ((0, SlowStore), (peak // 2, FileStore), (0, None), (peak // 2, None), (peak // 3, None)):
        moving = to_host(budget, budget % 7) if kind is None else offload(tmp_path, budget, kind)
        with moving:
            for step in range(STEPS):
                assert same(run(step), expected[step]), f"step {step} with {budget} of {peak} bytes, {kind}"
        assert budget or moving.figures.bytes_out > 0
