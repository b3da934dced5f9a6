"""Copies of thin parts of a block, which stay long after it has gone.

On a CPU those of one block lie in a mapping of their own. Among the block's large tensors they would stand in the way:
what is freed around them is no longer one piece, the next block's tensors do not fit there, and the heap grows by far
more than the strips (from 320 to 570 MiB in a step that `benchmarks.large_model_support.blocks` takes).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from tiledseg.geometry.box import Box


def cut_out(x_BCHW: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """What lies in the boxes, each in the layout of the whole."""
    parts = [x_BCHW[(slice(None), slice(None), *box.slices)].detach() for box in boxes]
    last = x_BCHW.stride(1) == 1 and x_BCHW.shape[1] > 1
    layout = torch.channels_last if last else torch.contiguous_format
    if x_BCHW.device.type != "cpu" or not parts:
        return [part.clone(memory_format=layout) for part in parts]
    sizes = [math.prod(part.shape) for part in parts]
    mapping = mmap.mmap(-1, max(1, sum(sizes) * x_BCHW.element_size()))
    flat = torch.from_numpy(np.frombuffer(mapping, np.uint8)).view(x_BCHW.dtype)
    copies = [own.view(_laid(part, last)) for own, part in zip(flat.split(sizes), parts, strict=True)]
    copies = [copy.permute(0, 3, 1, 2) if last else copy for copy in copies]
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part)
    return copies


def _laid(part_BCHW: torch.Tensor, last: bool) -> tuple[int, ...]:
    """The order in which its dims lie in memory."""
    batch, channels, height, width = part_BCHW.shape
    return (batch, height, width, channels) if last else (batch, channels, height, width)
