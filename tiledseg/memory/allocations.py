"""The memory that a step allocates, and the errors of memory that has run out."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiledseg.errors import MemoryLimitError, first_line

_GPU_WORDS = ("out of memory", "_ALLOC_FAILED", "_ALLOCATION_FAILED")  # of CUDA, and of its libraries, NCCL among them
_WORDS = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "can't start new thread", *_GPU_WORDS)


class AllocationMeter(TorchDispatchMode):
    """The bytes of living storages that were made inside this mode, now (`bytes`) and at most (`peak`)."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.living = {t.untyped_storage()._cdata: 0 for t in others}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._meet(tensor.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.living:
            self.living[storage._cdata] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.bytes -= self.living.pop(key)


def kept_for(run: Callable[[], torch.Tensor], own: Iterable[torch.Tensor]) -> tuple[torch.Tensor, int, int]:
    """Return the result of `run`, the bytes that autograd keeps for its backward pass besides `own`, and its
    multiply-adds."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # the result keeps all tensors alive: no two share memory
    steady = {tensor.untyped_storage()._cdata for tensor in own}
    bytes_kept = sum(size for storage, size in kept.items() if storage not in steady)
    return result, bytes_kept, counter.get_total_flops() // 2


def is_exhausted(error: BaseException | None) -> bool:
    """Return True if `error` says that memory of the host or a GPU has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, MemoryLimitError):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | RuntimeError) and any(word in str(error) for word in _WORDS)


def exhausted(error: BaseException, held: int, budget: int) -> MemoryLimitError:
    """Return the error in one line, with a budget that would fit. `held`: bytes that only autograd held in memory,
    under a budget of `budget`."""
    remedy = "nothing more can leave; use smaller tiles, a smaller batch or a smaller network"
    if most := min(held, budget):
        remedy = f"give a budget of {most * 3 // 4} bytes at most, or use smaller tiles"
    return MemoryLimitError(
        f"memory has run out; autograd alone held {held} of a budget of {budget} bytes: {remedy} ({first_line(error)})"
    )
