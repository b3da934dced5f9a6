"""Transfer of samples (input and classes) to the device; the precision of a run, and its determinism.

The thread that has read a sample for a GPU copies its arrays into pinned memory and sends them on a stream of its own,
while the network computes. The GPU waits for them at their first use, the host never (`memory.device`). There is a
pinned buffer for each sample in flight, two by default (`data.workers`). A CPU uses the arrays themselves.
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
    """A sample's arrays on a device, complete after `event`. `labels_HW`: with their margin."""

    x_CHW: torch.Tensor
    labels_HW: torch.Tensor | None
    event: Any

    def await_all(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return input and labels after making the current stream wait for them; the host does not wait."""
        stream = api(self.x_CHW.device).current_stream(self.x_CHW.device)
        stream.wait_event(self.event)
        for tensor in (self.x_CHW, self.labels_HW):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not reused before the stream is past it
        return self.x_CHW, self.labels_HW


def sender(device: torch.device) -> Send:
    """Return a thread-safe function that starts to copy a sample's arrays to `device` and returns the sample."""
    if not is_gpu(device):
        return lambda sample: sample
    gpu, stream = api(device), api(device).Stream(device)

    def send(sample: Sample) -> Sample:
        classes_HW = _labels(sample)
        with gpu.device(stream.device), gpu.stream(stream):  # a new thread's current device is GPU 0
            x_CHW = _sent(sample.x_CHW, device)
            labels_HW = None if classes_HW is None else _sent(classes_HW, device)
        return replace(sample, carried=Carried(x_CHW, labels_HW, stream.record_event()))

    return send


def _sent(array: NDArray, device: torch.device) -> torch.Tensor:
    return sent(torch.from_numpy(array if array.flags.writeable else array.copy()), device)


def network_input(sample: Sample, device: torch.device, is_untraced: bool = False) -> torch.Tensor:
    """Return a sample's context as a batch of one, channels last: the faster layout, whose CPU kernels also give a
    pixel the same bits in a tile of any size (docs/decisions/0002). `is_untraced`: in the array's layout, for a module
    that chooses its own."""
    x_CHW = _sent(sample.x_CHW, device) if sample.carried is None else sample.carried.await_all()[0]
    return x_CHW[None] if is_untraced else x_CHW[None].contiguous(memory_format=torch.channels_last)


def labels(sample: Sample, device: torch.device) -> torch.Tensor:
    """Return the classes of a sample: with the margin of `Sample.around_HW` if it has one, else of its core."""
    if sample.carried is not None:
        return sample.carried.await_all()[1]
    labels_HW = _labels(sample)
    assert labels_HW is not None, "a tile without labels cannot be trained on"
    return _sent(labels_HW, device)


def _labels(sample: Sample) -> NDArray | None:
    return sample.y_HW if sample.around_HW is None else sample.around_HW


CAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PARAMETER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, **dict.fromkeys(CAST_DTYPES, torch.float32)}
INPUT_DTYPES: dict[str, DTypeLike] = {"fp32": np.float32, "fp64": np.float64, **dict.fromkeys(CAST_DTYPES, np.float32)}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return torch's autocast for `bf16` or `fp16`, and an empty context for other precisions."""
    if precision not in CAST_DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=CAST_DTYPES[precision])


def use_one_kernel(on: bool) -> None:
    """Use the same kernels for every tile in a forward pass, each adding in one order, without TF32, as a map needs.
    Off: allow TF32 and cuDNN's choice by timing."""
    torch.backends.cudnn.deterministic = on  # a transposed convolution's forward pass is a convolution's backward pass
    torch.backends.cuda.matmul.allow_tf32 = not on
    torch.backends.cudnn.allow_tf32 = not on
    torch.backends.cudnn.benchmark = not on


def make_deterministic(on: bool) -> None:
    """Make runs bit-reproducible, backward passes included."""
    use_one_kernel(on)
    if on:
        # cuBLAS reads this at its start; without it two streams could share a workspace and change sums.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not `use_deterministic_algorithms`, which would also load and set the compiler.
    torch.set_deterministic_debug_mode("error" if on else "default")
    # torch would fill every new buffer with NaN; no code here reads uninitialised values.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def naming_disorder() -> Iterator[None]:
    """Turn torch's error for a function without a deterministic kernel, in a user's network, into ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        reason = first_line(error).split(", but you set")[0]
        raise ConfigError(f"train.deterministic is true, but {reason}; give train.deterministic false") from error
