"""Two lanes between a GPU's memory and the host's: one out, one in, both beside the computing.

Nobody on the host waits for them. A copy begins once the GPU has done all that was asked of it before; who wants what a
copy brings, or the memory that it reads, has the GPU wait:

    computing   ... make x | ........ | wait for `in` | use x
    out                    | x ----->                          `out` waits for the computing, and for `in`
    in                              | x <-----                 `in` waits for the computing, and for this copy out

So memory that is given back on the host may be given out again there at once: what is asked of the GPU next comes after
all that read or wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tiledseg.errors import MemoryLimitError, first_line
from tiledseg.memory.mover import Copying

_MOST_NOTED = 256  # stalls whose length has not been asked for


class Lanes(Protocol):
    """Of one device. Tensors are uint8, of one dim; `parts` of the host's memory follow each other in the other one."""

    @property
    def device(self) -> torch.device: ...

    def look(self) -> None:
        """Something is computed, by this thread and where it computes now, that copies read or that reads copies."""

    def host(self, size: int) -> torch.Tensor:
        """Memory of the host that is copied from and to directly. Raises MemoryLimitError where there is none."""

    def out(self, flat_P: torch.Tensor, parts: Sequence[torch.Tensor]) -> Copying:
        """Begin to copy a device's memory to the host's."""

    def back(self, parts: Sequence[torch.Tensor], flat_P: torch.Tensor, after: Copying) -> Copying:
        """Begin to copy it to a device's memory, `after` the copy out has ended."""

    def stood_still(self) -> float:
        """Seconds, since this was last asked, for which the device has waited for copies, as far as that is over."""

    def end(self) -> None:
        """Return once no copy runs."""


class GpuLanes:
    """See `Lanes`. Streams that compute are found out as they are seen; usually there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._computing: dict[int, torch.cuda.Stream] = {}
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stood = 0.0

    def look(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._computing.setdefault(stream.cuda_stream, stream)

    def host(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise MemoryLimitError(
                f"{size} bytes of the host's memory cannot be kept for copies of a GPU: {first_line(error)}; give the "
                "store a smaller limit, or keep more in the GPU's memory"
            ) from error

    def out(self, flat_P: torch.Tensor, parts: Sequence[torch.Tensor]) -> Copying:
        self._out.wait_stream(self._in)  # which may be reading these parts for somebody before
        return self._copy(self._out, flat_P.split([len(part) for part in parts]), parts)

    def back(self, parts: Sequence[torch.Tensor], flat_P: torch.Tensor, after: Copying) -> Copying:
        assert isinstance(after, _Copied), "a copy of these lanes"
        self._in.wait_event(after.event)
        return self._copy(self._in, parts, flat_P.split([len(part) for part in parts]), flat_P)

    def _copy(
        self,
        lane: torch.cuda.Stream,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        brought_P: torch.Tensor | None = None,
    ) -> _Copied:
        self.look()
        for stream in self._computing.values():
            lane.wait_stream(stream)
        with torch.cuda.stream(lane):
            for source_P, target_P in zip(sources, targets, strict=True):
                target_P.copy_(source_P, non_blocking=True)
            event = lane.record_event()
        return _Copied(self, event, torch.cuda.current_stream(self.device), brought_P)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """All that computes waits; the host does not."""
        self.look()
        for stream in self._computing.values():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            stream.wait_event(event)
            ended.record(stream)
            self._stalls.append((begun, ended))
        if len(self._stalls) > _MOST_NOTED:
            self._add_up()

    def stood_still(self) -> float:
        self._add_up()
        stood, self._stood = self._stood, 0.0
        return stood

    def _add_up(self) -> None:
        over = [ended.query() for _, ended in self._stalls]
        done = [stall for stall, is_over in zip(self._stalls, over, strict=True) if is_over]
        self._stalls = [stall for stall, is_over in zip(self._stalls, over, strict=True) if not is_over]
        self._stood += sum(begun.elapsed_time(ended) for begun, ended in done) / 1000

    def end(self) -> None:
        for lane in (self._out, self._in):
            lane.synchronize()


class _Copied:
    """See `Copying`. `made`: where the memory that it brings into was asked for."""

    def __init__(
        self, lanes: GpuLanes, event: torch.cuda.Event, made: torch.cuda.Stream, brought_P: torch.Tensor | None
    ) -> None:
        self.event = event
        self._lanes, self._made, self._brought_P = lanes, made, brought_P

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.stop()
        here = torch.cuda.current_stream(self._lanes.device)
        if self._brought_P is not None and here != self._made:
            self._brought_P.record_stream(here)  # torch gives memory out again by where it was asked for

    def stop(self) -> None:
        """A copy that has been asked for is made: what computes comes after it."""
        if not self.done():
            self._lanes.wait_for(self.event)
