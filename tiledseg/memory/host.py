"""A GPU's tensors in the host's memory: one stream copies out, one copies in, both beside the computing.

The host never waits for them. A copy starts once the GPU has finished its earlier work; a kernel that needs the copied
tensor, or overwrites its source, waits on the GPU:

    computing   ... make x | ........ | wait for `in` | use x
    out                    | x ----->                          `out` waits for the computing
    in                              | x <-----                 `in` waits for the computing, and for this copy out

So memory freed on the host may be reused there at once: later work of the GPU runs after all that read or wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiledseg.errors import MemoryLimitError, first_line
from tiledseg.memory.device import api
from tiledseg.memory.mover import Copying, Mover, Sent, Slot

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
        self._computing = list[Any]()  # streams

    def takes(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self.device:
            return False
        self._look()
        return True

    def _look(self) -> None:
        """Record the stream on which this thread computes."""
        if (stream := self._gpu.current_stream(self.device)) not in self._computing:
            self._computing.append(stream)

    def _out(self, flat_P: torch.Tensor, slot: Slot) -> Copying:
        while self._chunk * len(self._host) < slot.stop:
            self._host.append(self._host_memory(self._chunk))
        return self._copy_out(flat_P, self._parts(slot))

    def _back(self, sent: Sent, flat_P: torch.Tensor) -> Copying:
        unversioned_P = flat_P.data  # the copy must not count as a write: versions detect a user's writes
        return self._copy_back(self._parts(sent.slot), unversioned_P, sent.copying)

    def _parts(self, slot: Slot) -> list[torch.Tensor]:
        """Return the slot's memory: a part of each chunk that it covers."""
        parts, begin, stop = [], slot.offset, slot.offset + slot.size
        while begin < stop:
            number, at = divmod(begin, self._chunk)
            parts.append(self._host[number][at : at + stop - begin])
            begin += len(parts[-1])
        return parts

    def _host_memory(self, size: int) -> torch.Tensor:
        """Allocate pinned memory. Raises MemoryLimitError."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{size} bytes of the host's memory cannot be pinned for copies of a GPU: {first_line(error)}; "
                "give the store a smaller limit, or keep more in the GPU's memory"
            ) from error

    def _copy_out(self, flat_P: torch.Tensor, parts: Sequence[torch.Tensor]) -> Copying:
        """Start to copy GPU memory to the host, after the computing streams, which waited for earlier uses."""
        return self._copy(self._way_out, flat_P.split([len(part) for part in parts]), parts)

    def _copy_back(self, parts: Sequence[torch.Tensor], flat_P: torch.Tensor, after: Copying) -> Copying:
        """Start to copy host memory to the GPU, `after` the copy out."""
        assert isinstance(after, _LaneCopy), "a copy of this mover"
        self._way_in.wait_event(after.event)
        return self._copy(self._way_in, parts, flat_P.split([len(part) for part in parts]), flat_P)

    def _copy(
        self,
        lane: Any,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        brought_P: torch.Tensor | None = None,
    ) -> _LaneCopy:
        """Start to copy on a lane, after all work that the computing streams have so far. `brought_P`: GPU memory that
        the copy fills."""
        self._look()
        for stream in self._computing:
            lane.wait_stream(stream)
        with self._gpu.stream(lane):
            for source_P, target_P in zip(sources, targets, strict=True):
                target_P.copy_(source_P, non_blocking=True)
            event = lane.record_event()
        return _LaneCopy(self, event, self._gpu.current_stream(self.device), brought_P)

    def wait_for(self, event: Any) -> None:
        """Make all computing streams wait for an event; the host does not wait."""
        self._look()
        for stream in self._computing:
            stream.wait_event(event)

    def settle(self) -> None:
        for lane in (self._way_out, self._way_in):
            lane.synchronize()

    def close(self) -> None:
        self.settle()
        self._host.clear()


class _LaneCopy:
    """A copy on a lane (see `Copying`). `made`: the stream on which the filled memory `brought_P` was allocated."""

    def __init__(self, mover: HostMover, event: Any, made: Any, brought_P: torch.Tensor | None) -> None:
        self.event = event
        self._mover, self._made, self._brought_P = mover, made, brought_P

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Make the computing streams wait for the copy, which cannot be cancelled."""
        self._mover.wait_for(self.event)
        here = api(self._mover.device).current_stream(self._mover.device)
        if self._brought_P is not None and here != self._made:
            self._brought_P.record_stream(here)  # torch's allocator tracks only the allocating stream by itself

    stop = wait
