"""Counts where the host would wait for the GPU if the run's device were one: told by where tensors come from.

On a CPU all tensors lie in one place. Those that a call makes without naming a device, or of NumPy's, would lie on the
host; what is moved to the device, or made of what lies there, on the device. A wait is a value that is read of a tensor
on the device, and a copy to it that is not of pinned memory (`models.sending.sent`).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FACTORIES = {
    torch.tensor,
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.rand,
    torch.arange,
    torch.from_numpy,
    torch.as_tensor,
}
T = torch.Tensor
READS: set[Any] = {T.item, T.tolist, T.cpu, T.numpy, T.__float__, T.__int__, T.__bool__, T.__index__, T.nonzero}


class HostWaits(TorchFunctionMode):
    """`places`: how often the host would have waited, by file and line of the project's."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._host: dict[int, weakref.ref[torch.Tensor]] = {}

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """In the place of `sent`: the copy lies on the device, and nobody has waited."""
        with torch._C.DisableTorchFunction():
            return tensor.detach().clone()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        on_host = [self._is_host(tensor) for tensor in given]
        named = kwargs.get("device") is not None
        moved = function is T.to and (named or any(isinstance(arg, torch.device | str) for arg in args[1:]))
        to_host = moved and args[1:2] == ("cpu",)
        some_there = not all(on_host)
        waits = (
            (function in READS or to_host or function is T.new_tensor) and some_there,
            moved and not to_host and any(on_host),  # a copy of pageable memory
            function is torch.tensor and named,
        )
        if any(waits):
            self._count()
        made = function(*args, **kwargs)
        host = to_host or (function in FACTORIES and not named) or (bool(given) and all(on_host) and not moved)
        for tensor in _tensors(made):
            if host:
                self._host[id(tensor)] = weakref.ref(tensor)
            elif id(tensor) in self._host and not any(tensor is one for one in given):
                del self._host[id(tensor)]
        return made

    def _is_host(self, tensor: torch.Tensor) -> bool:
        known = self._host.get(id(tensor))
        return known is not None and known() is tensor

    def _count(self) -> None:
        frame = sys._getframe(2)
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            if "/torch/optim/" in frame.f_code.co_filename:
                return  # the number of steps, which lies on the host on a GPU too
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self.places[f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"] += 1


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
