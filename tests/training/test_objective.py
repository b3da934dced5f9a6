from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tiledseg.training.objective import ClassObjective, cross_entropy_sums


def sample(height: int, width: int, classes: int, ignored: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(height * 100 + width)
    logits = torch.randn(1, classes, height, width, generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, (1, height, width), generator=generator)
    target[torch.rand(target.shape, generator=generator) < ignored] = 255
    return logits, target.to(torch.uint8)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 5), st.sampled_from([0.0, 0.4]), st.integers(0, 9))
def test_sums_of_parts_are_the_sums_of_the_whole(
    height: int, width: int, classes: int, ignored: float, cut: int
) -> None:
    logits, target = sample(height, width, classes, ignored)
    cut = min(cut, height)
    whole = cross_entropy_sums(logits, target, 255)
    parts = [cross_entropy_sums(logits[:, :, rows], target[:, rows], 255) for rows in (slice(0, cut), slice(cut, None))]
    for i in range(2):
        assert whole[i].item() == pytest.approx(parts[0][i].item() + parts[1][i].item(), rel=1e-12, abs=1e-12)
    valid = (target != 255).sum().item()
    assert whole[1].item() == valid
    if valid:
        mean = functional.cross_entropy(logits, target.long(), ignore_index=255)
        assert (whole[0] / whole[1]).item() == pytest.approx(mean.item(), rel=1e-12)


def test_a_tile_without_a_valid_pixel_is_zero_with_zero_gradient() -> None:
    logits, target = sample(3, 4, 3, 0.0)
    logits.requires_grad_()
    loss, weight = cross_entropy_sums(logits, torch.full_like(target, 255), 255)
    loss.backward()
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 9))
def test_weighted_sums_of_parts_give_torchs_weighted_mean(height: int, width: int, ignored: float, cut: int) -> None:
    logits, target = sample(height, width, 4, ignored)
    objective, cut = ClassObjective(255, weights=(0.25, 3.0, 0.0, 1.5)), min(cut, height)
    parts = [objective.sums((logits[:, :, rows],), target[:, rows]) for rows in (slice(0, cut), slice(cut, None))]
    loss, weight = (sum(part[i].item() for part in parts) for i in range(2))
    of_each = torch.tensor([*objective.weights, *[0.0] * 252], dtype=torch.float64)[target.long()]
    assert weight == pytest.approx(of_each.sum().item(), rel=1e-14)
    if weight:
        weights_K = torch.tensor(objective.weights, dtype=torch.float64)
        mean = functional.cross_entropy(logits, target.long(), weights_K, ignore_index=255)
        assert loss / weight == pytest.approx(mean.item(), rel=1e-12)
