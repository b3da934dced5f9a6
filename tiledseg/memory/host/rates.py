"""What the way between a device's memory and the host's reaches."""

from __future__ import annotations

import time

import torch

from tiledseg.memory.disk.rates import TENSOR, StoreRates
from tiledseg.memory.host.host_mover import CHUNK, HostMover
from tiledseg.memory.host.lanes import Lanes
from tiledseg.memory.mover import Sent


def host_rates(lanes: Lanes, size: int, tensor: int = TENSOR, chunk: int = CHUNK) -> StoreRates:
    """Of `size` bytes in tensors of `tensor` bytes; sent once before, which makes the host's memory. Raises
    MemoryLimitError where there is none."""
    data_P = torch.zeros(tensor, dtype=torch.uint8, device=lanes.device)
    mover, count = HostMover(lanes, size, chunk), size // tensor

    def sent() -> list[Sent]:
        return [mover.send(data_P) for _ in range(count)]

    try:
        for each in sent():
            mover.drop(each)
        lanes.end()
        begun = time.perf_counter()
        there = sent()
        lanes.end()
        out = time.perf_counter()
        brought = [mover.bring(each, tensor) for each in there]
        lanes.end()
        back = time.perf_counter()
        del brought  # not before: each takes memory of its own
    finally:
        mover.close()
    return StoreRates(count * tensor / (out - begun), count * tensor / (back - out))
