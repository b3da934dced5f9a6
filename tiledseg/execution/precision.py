"""Which numbers a run computes with, and that it computes the same ones each time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import DTypeLike

from tiledseg.errors import ConfigError, first_line

CAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PARAMETER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, **dict.fromkeys(CAST_DTYPES, torch.float32)}
INPUT_DTYPES: dict[str, DTypeLike] = {"fp32": np.float32, "fp64": np.float64, **dict.fromkeys(CAST_DTYPES, np.float32)}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Cast to the 16 bits of `bf16` or `fp16` where that is safe; nothing for the others."""
    if precision not in CAST_DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=CAST_DTYPES[precision])


def use_one_kernel(on: bool) -> None:
    """Take the same kernels for every tile in a forward pass, each adding in one order, without TF32; else TF32 and
    cuDNN's choice by timing are allowed. All that a map needs."""
    torch.backends.cudnn.deterministic = on  # a transposed convolution's forward pass is a convolution's backward pass
    torch.backends.cuda.matmul.allow_tf32 = not on
    torch.backends.cudnn.allow_tf32 = not on
    torch.backends.cudnn.benchmark = not on


def make_deterministic(on: bool) -> None:
    """Make the same inputs give the same bits, run after run, backward passes included."""
    use_one_kernel(on)
    if on:
        # cuBLAS reads this when it starts; without it two streams could share a workspace and change sums.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As `use_deterministic_algorithms`, which would also load and set the compiler: nothing is compiled here.
    torch.set_deterministic_debug_mode("error" if on else "default")
    # torch would write NaN over every new buffer first; nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def naming_disorder() -> Iterator[None]:
    """Raise ConfigError where torch has no kernel that adds in one order: in functions of somebody's network."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        reason = first_line(error).split(", but you set")[0]
        raise ConfigError(f"train.deterministic is true, but {reason}; give train.deterministic false") from error
