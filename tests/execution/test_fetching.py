"""Tests of a map's window on its way to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiledseg.inference.mapping import to_host

SHAPE = (5, 7)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("are_shares", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
def test_arrays_are_those_of_the_scores(probabilities: bool, are_shares: bool, device: str) -> None:
    """Several windows are under way at once."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    scores = [torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(number)) for number in range(9)]
    windows = [to_host(one.to(device), probabilities, are_shares) for one in scores]
    for window, scores_KHW in zip(windows, scores, strict=True):
        classes_HW, finite_HW, *shares = map(np.asarray, window())
        np.testing.assert_array_equal(classes_HW, scores_KHW.numpy().argmax(0))
        assert finite_HW.all()
        expected = [scores_KHW if are_shares else scores_KHW.softmax(0)] * probabilities
        np.testing.assert_allclose(shares, [each.numpy() for each in expected], rtol=1e-6)


def test_scores_that_are_no_numbers_are_known() -> None:
    """One is enough; of a class that is left out with certainty it is none."""
    scores_KHW = torch.randn(3, *SHAPE)
    scores_KHW[1, 0, 0], scores_KHW[2, 1, 1], scores_KHW[0, 2, 2] = torch.nan, torch.inf, -torch.inf
    finite_HW = np.asarray(to_host(scores_KHW, False, False)()[1])
    assert np.argwhere(~finite_HW).tolist() == [[0, 0], [1, 1]]
