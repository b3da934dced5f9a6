"""A crop's gradient lies as its tensor does, and is that of the slices."""

from __future__ import annotations

import pytest
import torch

from tiledseg.models.layers.block import cropped

ROWS, COLS = slice(1, 5), slice(2, 9)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("within", [False, True])
def test_values_and_gradient_are_those_of_slices(layout: torch.memory_format, within: bool) -> None:
    """Also of a tensor that is itself a part of another."""
    found = []
    for crop in (cropped, lambda x, rows, cols: x[:, :, rows, cols]):
        whole = torch.rand(2, 3, 9, 12, generator=torch.Generator().manual_seed(0)).to(memory_format=layout)
        whole.requires_grad_()
        x_BCHW = crop(whole, slice(1, 8), slice(1, 11)) if within else whole * 2
        part = crop(x_BCHW, ROWS, COLS)
        (gradient,) = torch.autograd.grad((part**2).sum() + x_BCHW.sum(), whole)
        found.append((part, gradient))
    (part, gradient), (sliced, wanted) = found
    assert torch.equal(part, sliced)
    assert torch.equal(gradient, wanted)
    assert gradient.is_contiguous(memory_format=layout), "the gradient lies as the tensor does"


def test_without_a_gradient_it_is_the_slices() -> None:
    x_BCHW = torch.rand(1, 2, 6, 10)
    assert cropped(x_BCHW, ROWS, COLS).data_ptr() == x_BCHW[:, :, ROWS, COLS].data_ptr()
