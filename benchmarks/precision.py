"""Numbers of programs that run in either precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Drawn in float64 and rounded, so that runs in float32 and in float64 see the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
