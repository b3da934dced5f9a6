"""Ways to have a step take less memory, each as a context around it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tiledseg
from tiledseg.memory.offload import LEAST, Offload

Way = Callable[[], AbstractContextManager[object]]


def ours(store: Path, budget: int) -> Offload:
    return tiledseg.large_model_support(budget=budget, store=store, store_limit="1TiB")


class _Filed(NamedTuple):
    path: Path
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class NaiveFiles(saved_tensors_hooks):
    """What one writes in ten lines: each kept tensor to a file of its own, and back when it is wanted."""

    def __init__(self, store: Path) -> None:
        folder = tempfile.TemporaryDirectory(dir=store)
        count = iter(range(1 << 62))

        def pack(tensor: torch.Tensor) -> object:
            if tensor.numel() * tensor.itemsize < LEAST or (tensor.is_leaf and tensor.requires_grad):
                return tensor.detach()
            path = Path(folder.name, str(next(count)))
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tofile(path)
            return _Filed(path, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: object) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            assert isinstance(kept, _Filed)
            flat_P = torch.from_numpy(np.fromfile(kept.path, np.uint8)).view(kept.dtype)
            kept.path.unlink()
            return flat_P.as_strided(kept.shape, kept.stride, kept.offset)

        super().__init__(pack, unpack)


def other_ways(store: Path) -> dict[str, Way]:
    """On a CPU `save_on_cpu` frees nothing: it copies from memory to memory. It stands here for its cost alone."""
    return {
        "nothing": nullcontext,
        "save_on_cpu (frees nothing on a CPU)": save_on_cpu,
        "a file for each tensor": lambda: NaiveFiles(store),
    }
