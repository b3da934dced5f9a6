"""torch as it comes, whatever runs before have set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def kernels_as_they_come() -> Iterator[None]:
    """torch has no deterministic unpooling, and a run before may have asked for such kernels alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)
