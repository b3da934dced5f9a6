"""A GPU's tensors in the host's memory: one stream copies out, one copies in, both beside the computing.

The host never waits for them. A copy starts once the GPU has finished its earlier work; a kernel that needs the copied
tensor, or overwrites its source, waits on the GPU:

    computing   ... make x | ........ | wait for `in` | use x
    out                    | x ----->                          `out` waits for the computing
    in                              | x <-----                 `in` waits for the computing, and for this copy out

So memory freed on the host may be reused there at once: later work of the GPU runs after all that read or wrote it.
"""

from __future__ import annotations

from typing import Any

import torch

from tiledseg.errors import MemoryLimitError, first_line
from tiledseg.memory.device import api
from tiledseg.memory.mover import Copy, Mover, Slot

CHUNK = 256 << 20
"""Bytes of one allocation of the host's memory: a power of two, to which torch rounds pinned memory up."""


class HostMover(Mover):
    """A mover of a GPU's tensors by two streams ("lanes"), out and in. At most `limit` bytes lie in the host's memory,
    which grows by `chunk` bytes in the first step and then stays. torch's allocator places tensors that come back.
    Streams that compute are recorded when they are first seen; usually there is one."""

    def __init__(self, device: torch.device, limit: int, chunk: int = CHUNK) -> None:
        super().__init__("the store in the host's memory", limit, device)
        self._chunk, self._host = chunk, list[torch.Tensor]()
        self._gpu = api(device)
        self._way_out, self._way_in = self._gpu.Stream(device), self._gpu.Stream(device)
        self.computing = list[Any]()  # streams

    def takes(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self.device:
            return False
        self.look()
        return True

    def look(self) -> Any:
        """Record, and return, the stream on which this thread computes."""
        stream = self._gpu.current_stream(self.device)
        if stream not in self.computing:
            self.computing.append(stream)
        return stream

    def _start(self, slot: Slot, flat_P: torch.Tensor, sent: Copy | None) -> LaneCopy:
        """Copy after all work that the computing streams have so far: these waited for earlier uses of the memory."""
        while self._chunk * len(self._host) < slot.stop:
            try:
                self._host.append(torch.empty(self._chunk, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise MemoryLimitError(
                    f"{self._chunk} bytes of the host's memory cannot be pinned for copies of a GPU: "
                    f"{first_line(error)}; give the store a smaller limit, or keep more in the GPU's memory"
                ) from error
        lane = self._way_out if sent is None else self._way_in
        if sent is not None:
            assert isinstance(sent, LaneCopy), "a copy of this mover"
            lane.wait_event(sent.event)
        self.look()
        for stream in self.computing:
            lane.wait_stream(stream)
        unversioned_P = flat_P.data  # the copy must not count as a write: versions detect a user's writes
        with self._gpu.stream(lane):
            begin = slot.offset
            while begin < slot.offset + slot.size:  # part by part of each chunk that the slot covers
                number, at = divmod(begin, self._chunk)
                part_P = unversioned_P[begin - slot.offset :][: self._chunk - at]
                host_P = self._host[number][at : at + len(part_P)]
                source_P, target_P = (part_P, host_P) if sent is None else (host_P, part_P)
                target_P.copy_(source_P, non_blocking=True)
                begin += len(part_P)
            event = lane.record_event()
        return LaneCopy(slot, self, event, None if sent is None else flat_P)

    def close(self) -> None:
        self._host.clear()  # torch reuses pinned memory once the copies of it are done


class LaneCopy(Copy):
    """A copy on a lane, which cannot be cancelled. `brought_P`: GPU memory that it fills."""

    def __init__(self, slot: Slot, mover: HostMover, event: Any, brought_P: torch.Tensor | None) -> None:
        super().__init__(slot)
        self.event = event
        self._mover, self._brought_P = mover, brought_P

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Make all computing streams wait for the copy; the host does not wait."""
        here = self._mover.look()
        for stream in self._mover.computing:
            stream.wait_event(self.event)
        if self._brought_P is not None:
            self._brought_P.record_stream(here)  # torch's allocator tracks only the allocating stream by itself

    stop = wait
