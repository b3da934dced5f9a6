"""Samples on their way to the device: the network's input, and classes; the precision of a run, with the same bits.

The thread that has read a sample for a GPU copies its arrays into pinned memory and sends them on a stream of their
own, while the network computes. The GPU waits for them at their first use, the host never (`memory.device`). So as
many pinned buffers as samples are on their way, two by default (`data.workers`). A CPU takes the arrays as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tiledseg.errors import ConfigError, first_line
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


def network_input(sample: Sample, device: torch.device, is_untraced: bool = False) -> torch.Tensor:
    """Return the context as a batch of one, x_BCHW, channels last: the faster layout, whose CPU kernels also give a
    pixel the same bits whatever the size of the tile around it (docs/decisions/0002). `is_untraced`: as it is, for a
    module that chooses its layout."""
    x_CHW = _sent(sample.x_CHW, device) if sample.carried is None else sample.carried.await_all()[0]
    return x_CHW[None] if is_untraced else x_CHW[None].contiguous(memory_format=torch.channels_last)


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
