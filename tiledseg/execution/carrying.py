"""Samples on their way to the device: the network's input, and classes.

The thread that has read a sample for a GPU copies its arrays into pinned memory and sends them on a stream of their
own, while the network computes. The GPU waits for them at their first use, the host never (`memory.device`). So as
many pinned buffers as samples are on their way, two by default (`data.prefetch`). A CPU takes the arrays as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from tiledseg.memory.device import api, is_gpu, sent
from tiledseg.raster.samples.dataset import Sample

Send = Callable[[Sample], Sample]


class Carried(NamedTuple):
    """A sample's arrays on a device, and the event after which they are there. `labels_HW`: with their margin."""

    x_CHW: torch.Tensor
    labels_HW: torch.Tensor | None
    event: Any

    def await_all(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return input and labels, which the current stream may use: it waits, not the host."""
        stream = api(self.x_CHW.device).current_stream(self.x_CHW.device)
        stream.wait_event(self.event)
        for tensor in (self.x_CHW, self.labels_HW):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not given out again before the stream is past it
        return self.x_CHW, self.labels_HW


def sender(device: torch.device) -> Send:
    """Return a function that gives a sample back with its arrays on their way to `device`.

    Any number of threads may call it at once.
    """
    if not is_gpu(device):
        return lambda sample: sample
    gpu, stream = api(device), api(device).Stream(device)

    def send(sample: Sample) -> Sample:
        classes_HW = _labels(sample)
        with gpu.device(stream.device), gpu.stream(stream):  # a new thread's own device is GPU 0
            x_CHW = _sent(sample.x_CHW, device)
            labels_HW = None if classes_HW is None else _sent(classes_HW, device)
        return replace(sample, carried=Carried(x_CHW, labels_HW, stream.record_event()))

    return send


def _sent(array: NDArray, device: torch.device) -> torch.Tensor:
    return sent(torch.from_numpy(array if array.flags.writeable else array.copy()), device)


def network_input(sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the context as a batch of one, x_BCHW, channels last: the faster layout, whose CPU kernels also give a
    pixel the same bits whatever the size of the tile around it (docs/decisions/0002)."""
    x_CHW = _sent(sample.x_CHW, device) if sample.carried is None else sample.carried.await_all()[0]
    return x_CHW[None].contiguous(memory_format=torch.channels_last)


def labels(sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the classes of a sample, with the margin that it was loaded with (`Sample.around`), else of its core."""
    if sample.carried is not None:
        carried_HW: torch.Tensor = sample.carried.await_all()[1]
        return carried_HW
    labels_HW = _labels(sample)
    assert labels_HW is not None, "a tile without labels cannot be trained on"
    return _sent(labels_HW, device)


def _labels(sample: Sample) -> NDArray | None:
    return sample.y_HW if sample.around_HW is None else sample.around_HW
