"""Tests of a map's window on its way to the host."""

from __future__ import annotations

import numpy as np
import torch

from tiledseg.inference.mapping import to_host

SHAPE = (5, 7)


def test_scores_that_are_no_numbers_are_known() -> None:
    """One is enough; of a class that is left out with certainty it is none."""
    scores_KHW = torch.randn(3, *SHAPE)
    scores_KHW[1, 0, 0], scores_KHW[2, 1, 1], scores_KHW[0, 2, 2] = torch.nan, torch.inf, -torch.inf
    finite_HW = np.asarray(to_host(scores_KHW, False, False)()[1])
    assert np.argwhere(~finite_HW).tolist() == [[0, 0], [1, 1]]
