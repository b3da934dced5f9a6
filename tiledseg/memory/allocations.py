"""A meter of the memory that a step of PyTorch allocates: it follows each storage from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationMeter(TorchDispatchMode):
    """The sum of bytes of living storages made inside it, and its peak."""

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
