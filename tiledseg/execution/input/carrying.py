"""Samples on their way to the device: what a raster stores, and classes, each in as few bytes as it has on the disk.

The thread that has read a sample for a GPU copies its arrays into pinned memory and sends them on a stream of their
own, while the network computes. The GPU waits for them at their first use, the host never (`models.sending`). So as
many pinned buffers as samples are on their way, two by default (`data.prefetch`). A CPU takes the arrays as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.execution.input.stored_input import stored_input
from tiledseg.models.sending import sent
from tiledseg.raster.samples.dataset import Sample

Send = Callable[[Sample], Sample]


class Carried(NamedTuple):
    """A sample's arrays on a device, and the event after which they are there. `labels_HW`: with their margin."""

    pixels_CHW: torch.Tensor
    valid_HW: torch.Tensor | None
    labels_HW: torch.Tensor | None
    event: Any

    def await_all(self) -> Carried:
        """Return the arrays, which the current stream may use: it waits, not the host."""
        stream = torch.cuda.current_stream(self.pixels_CHW.device)
        stream.wait_event(self.event)
        for tensor in (self.pixels_CHW, self.valid_HW, self.labels_HW):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not given out again before the stream is past it
        return self


def sender(device: torch.device) -> Send:
    """Return a function that gives a sample back with its arrays on their way to `device`.

    Any number of threads may call it at once.
    """
    if device.type != "cuda":
        return lambda sample: sample
    stream = torch.cuda.Stream(device)

    def send(sample: Sample) -> Sample:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):  # a new thread's own device is GPU 0
            pixels_CHW, valid_HW, labels_HW = (
                array if array is None else _sent(array, device) for array in _arrays(sample)
            )
            assert pixels_CHW is not None, "every sample has pixels, if none of them"
            event = torch.cuda.Event()
            event.record(stream)
        return replace(sample, carried=Carried(pixels_CHW, valid_HW, labels_HW, event))

    return send


def _sent(array: NDArray, device: torch.device) -> torch.Tensor:
    return sent(torch.from_numpy(array if array.flags.writeable else array.copy()), device)


def network_input(sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the context as a batch of one, x_BCHW, channels last: the faster layout, whose CPU kernels also give a
    pixel the same bits whatever the size of the tile around it (docs/decisions/0002)."""
    if sample.carried is not None:
        pixels_CHW, valid_HW = sample.carried.await_all()[:2]
    else:
        pixels_CHW, valid_HW = (None if array is None else _sent(array, device) for array in _arrays(sample)[:2])
    if sample.rule is None:
        return pixels_CHW[None].contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        return stored_input(pixels_CHW[None], valid_HW, sample.rule)


def labels(sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the classes of a sample, with the margin that it was loaded with (`Sample.around`), else of its core."""
    if sample.carried is not None:
        found: torch.Tensor = sample.carried.await_all().labels_HW
        return found
    labels_HW = _arrays(sample)[2]
    assert labels_HW is not None, "a tile without labels cannot be trained on"
    return _sent(labels_HW, device)


def bytes_on_the_way(sample: Sample) -> int:
    """Count the bytes of a sample go to the device."""
    return sum(array.nbytes for array in _arrays(sample) if array is not None)


def _arrays(sample: Sample) -> tuple[NDArray, NDArray[np.bool_] | None, NDArray[np.uint8] | None]:
    """Return pixels, their validity, classes."""
    valid_HW = None if sample.rule is None else sample.rule.valid_HW
    return sample.pixels_CHW, valid_HW, sample.y_HW if sample.around_HW is None else sample.around_HW
