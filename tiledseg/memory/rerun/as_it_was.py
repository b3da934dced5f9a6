"""What somebody's module depends on besides its inputs, as it was before it ran: so that it may run once more, give the
same, and change nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from tiledseg.memory.saved import UnmovedTensor

_SMALL = 1 << 20  # bytes of a buffer that is copied; a larger one must not change


class Modules:
    """The attributes and buffers of modules and of all within them: running statistics, counters, what a forward pass
    puts down. Parameters stay where they are; they must not change in between."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._before = [self._attributes(part) for part in self._parts]
        self._fixed = [UnmovedTensor(tensor) for part in self._parts for tensor in _must_not_change(part)]

    @staticmethod
    def _attributes(part: nn.Module) -> dict[str, Any]:
        return {**part.__dict__, "_buffers": _copied(part._buffers)}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Meanwhile they are as they were. Raises RuntimeError where what must not change has been written over."""
        for fixed in self._fixed:
            fixed.tensor()
        now = [dict(part.__dict__) for part in self._parts]
        again = [{**before, "_buffers": _copied(before["_buffers"])} for before in self._before]
        try:
            self._put(again)
            yield
        finally:
            self._put(now)

    def _put(self, attributes: Sequence[dict[str, Any]]) -> None:
        for part, each in zip(self._parts, attributes, strict=True):
            part.__dict__.clear()
            part.__dict__.update(each)


def _must_not_change(part: nn.Module) -> Iterator[torch.Tensor]:
    yield from (weight for weight in part._parameters.values() if weight is not None)
    yield from (buffer for buffer in part._buffers.values() if buffer is not None and buffer.nbytes > _SMALL)


def _copied(buffers: dict[str, Any]) -> dict[str, Any]:
    """With copies of the small ones, over which the module may write."""
    return {
        name: buffer.detach().clone() if buffer is not None and buffer.nbytes <= _SMALL else buffer
        for name, buffer in buffers.items()
    }


class Draws:
    """Where the generators of torch (of the CPU, and of devices of `tensors`), NumPy and Python stand."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices, self._states = get_device_states(*tensors)
        self._kinds = [tensor for tensor in tensors if tensor.device.type != "cpu"][:1]
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Meanwhile they stand there again."""
        now = Draws(self._kinds)
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=self._kinds[0].device.type)


class Autocast:
    """Whether, and to what, operations of a device's kind are cast."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds = dict.fromkeys(["cpu", *(tensor.device.type for tensor in tensors)])
        self._kinds = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._kinds:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield
