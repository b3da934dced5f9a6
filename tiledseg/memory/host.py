"""A GPU's tensors in the host's memory: two lanes, one out, one in, both beside the computing.

Nobody on the host waits for them. A copy begins once the GPU has done all that was asked of it before; who wants what a
copy brings, or the memory that it reads, has the GPU wait:

    computing   ... make x | ........ | wait for `in` | use x
    out                    | x ----->                          `out` waits for the computing
    in                              | x <-----                 `in` waits for the computing, and for this copy out

So memory that is given back on the host may be given out again there at once: what is asked of the GPU next comes after
all that read or wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiledseg.errors import MemoryLimitError, first_line
from tiledseg.memory.device import api
from tiledseg.memory.mover import Copying, Mover, Sent, Slot

CHUNK = 256 << 20
"""Bytes of the host's memory that are asked for at once: a power of two, to which torch rounds pinned memory up."""


class HostMover(Mover):
    """A mover of a GPU's tensors, by a lane out and a lane in. At most `limit` bytes lie in the host's memory, which
    grows by `chunk` bytes in the first step and stays. Bytes that come back lie where torch's allocator puts them.
    Streams that compute are noted as they are seen; usually there is one."""

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
        """Note the stream on which this thread computes what copies read, or what reads copies."""
        if (stream := self._gpu.current_stream(self.device)) not in self._computing:
            self._computing.append(stream)

    def _out(self, flat_P: torch.Tensor, slot: Slot) -> Copying:
        while self._chunk * len(self._host) < slot.stop:
            self._host.append(self._host_memory(self._chunk))
        return self._copy_out(flat_P, self._parts(slot))

    def _back(self, sent: Sent, flat_P: torch.Tensor) -> Copying:
        unversioned_P = flat_P.data  # who writes over what has come back is found by versions: no copy may count
        return self._copy_back(self._parts(sent.slot), unversioned_P, sent.copying)

    def _parts(self, slot: Slot) -> list[torch.Tensor]:
        """Return the slot's memory, a part of each chunk that it reaches into."""
        parts, begin, stop = [], slot.offset, slot.offset + slot.size
        while begin < stop:
            number, at = divmod(begin, self._chunk)
            parts.append(self._host[number][at : at + stop - begin])
            begin += len(parts[-1])
        return parts

    def _host_memory(self, size: int) -> torch.Tensor:
        """Return memory of the host that is copied from and to directly. Raises MemoryLimitError where there is
        none."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{size} bytes of the host's memory cannot be kept for copies of a GPU: {first_line(error)}; give the "
                "store a smaller limit, or keep more in the GPU's memory"
            ) from error

    def _copy_out(self, flat_P: torch.Tensor, parts: Sequence[torch.Tensor]) -> Copying:
        """Begin to copy a device's memory to the host's: after who used these parts before, whose copies what computes
        has come after."""
        return self._copy(self._way_out, flat_P.split([len(part) for part in parts]), parts)

    def _copy_back(self, parts: Sequence[torch.Tensor], flat_P: torch.Tensor, after: Copying) -> Copying:
        """Begin to copy it to a device's memory, `after` the copy out has ended."""
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
        self._look()
        for stream in self._computing:
            lane.wait_stream(stream)
        with self._gpu.stream(lane):
            for source_P, target_P in zip(sources, targets, strict=True):
                target_P.copy_(source_P, non_blocking=True)
            event = lane.record_event()
        return _LaneCopy(self, event, self._gpu.current_stream(self.device), brought_P)

    def wait_for(self, event: Any) -> None:
        """Have all that computes wait; the host does not."""
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
    """See `Copying`. `made`: where the memory `brought_P` that it brings into was asked for."""

    def __init__(self, mover: HostMover, event: Any, made: Any, brought_P: torch.Tensor | None) -> None:
        self.event = event
        self._mover, self._made, self._brought_P = mover, made, brought_P

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """Have what computes come after the copy, which is made in any case."""
        self._mover.wait_for(self.event)
        here = api(self._mover.device).current_stream(self._mover.device)
        if self._brought_P is not None and here != self._made:
            self._brought_P.record_stream(here)  # torch gives memory out again by where it was asked for

    stop = wait
