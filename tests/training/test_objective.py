from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tiledseg.training.objective import PixelTerm, cross_entropies


def test_a_tile_without_a_valid_pixel_is_zero_with_zero_gradient() -> None:
    logits = torch.randn(1, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    loss, weight = PixelTerm(255).sums((logits,), torch.full((1, 3, 4), 255, dtype=torch.uint8))
    loss.backward()
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [2, 5, 9])
def test_a_pixels_loss_has_the_same_bits_in_any_tile(classes: int, dtype: torch.dtype, smoothing: float) -> None:
    """And its gradient: no kernel takes what is left of a vector of pixels by itself."""
    generator = torch.Generator().manual_seed(classes)
    logits = 5 * torch.randn(1, classes, 64, 48, generator=generator, dtype=dtype)
    target = torch.randint(0, classes, (1, 64, 48), generator=generator, dtype=torch.uint8)
    target[:, 30] = 255
    weights = tuple(1 + k / 3 for k in range(classes))

    def one(rows: slice, cols: slice, layout: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
        tile, labels = logits[:, :, rows, cols].contiguous(memory_format=layout).requires_grad_(), target[:, rows, cols]
        losses = cross_entropies(tile, labels, 255, weights, smoothing)
        assert len(losses) == labels.numel()
        return losses.detach().view(labels.shape), torch.autograd.grad(losses.sum(), tile)[0]

    whole, gradient = one(slice(None), slice(None), torch.channels_last)
    exact = functional.cross_entropy(
        logits, target.long(), logits.new_tensor(weights), ignore_index=255, reduction="none", label_smoothing=smoothing
    )
    rounding = 1e-5 if dtype == torch.float32 else 1e-13
    assert whole.numpy() == pytest.approx(exact.numpy(), rel=rounding, abs=rounding)
    for rows, cols in ((slice(3, 34), slice(5, 38)), (slice(29, 32), slice(0, 5)), (slice(7, 8), slice(9, 10))):
        for layout in (torch.channels_last, torch.contiguous_format):
            losses, slopes = one(rows, cols, layout)
            assert torch.equal(losses, whole[:, rows, cols])
            assert torch.equal(slopes, gradient[:, :, rows, cols])
