"""Cases that tests draw are the same everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("_again", [1, 2])
def test_draws_do_not_depend_on_the_tests_before(_again: int) -> None:
    """Of Python, NumPy and torch, as `conftest.py` sets them."""
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    assert drawn == (0.13436424411240122, 0.417022004702574, 0.7576315999031067)
