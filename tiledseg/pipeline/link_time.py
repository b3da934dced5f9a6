"""The time of a message between neighbouring stages, measured before a run, for an automatic balance."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiledseg.comm.transports.collectives import Communicator
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.geometry.sharing.mesh_shape import MeshShape

_SMALL, _LARGE = 1 << 12, 1 << 23  # bytes
_REPEATS = 5


class MeasuredLink(NamedTuple):
    """Seconds of a message: `latency`, and `per_byte` on top."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        return self.latency + size * self.per_byte


def slowest_link(communicator: Communicator, shape: MeshShape, device: torch.device) -> MeasuredLink:
    """Return the slowest link between two stages that follow each other, of all pipelines; the same on all ranks.
    Collective.

    Stages 0 and 1, 2 and 3, ... talk at the same time, then 1 and 2, 3 and 4, ...: as in a run, all pairs share what
    the machine has. Each message goes forth and back, so no two ranks wait for one another.
    """
    position = shape.position(communicator.rank)
    messages = communicator.point_to_point()
    found = [MeasuredLink(0.0, 0.0)]
    for first in (0, 1):
        if position is None:
            break
        stage = position.stage
        other = stage + 1 if stage % 2 == first else stage - 1
        if 0 <= other < shape.stages:
            peer = shape.rank_at(position._replace(stage=other))
            found.append(measure_link(messages, peer, stage < other, device))
    messages.close()
    slowest = MeasuredLink(*map(max, zip(*found, strict=True)))
    return MeasuredLink(*map(max, zip(*communicator.gather_objects(slowest), strict=True)))


def measure_link(messages: PointToPoint, peer: int, begins: bool, device: torch.device) -> MeasuredLink:
    """Measure a link by the quickest of some small and some large messages.

    Called by both ends, of which one `begins`.
    """
    small, large = (_seconds(messages, peer, begins, size, device) for size in (_SMALL, _LARGE))
    return MeasuredLink(small, max(0.0, large - small) / (_LARGE - _SMALL))


def _seconds(messages: PointToPoint, peer: int, begins: bool, size: int, device: torch.device) -> float:
    """Return seconds of one way, half of forth and back.

    The first of all also opens the connection, and does not count.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    back = torch.empty_like(out)
    watch, taken = Stopwatch(device), []
    for _ in range(1 + _REPEATS):
        watch.reset()
        with watch.running():
            for sends in (begins, not begins):
                message = Message(peer, out if sends else back)
                messages.start([message] if sends else [], [] if sends else [message]).wait()
        taken.append(watch.seconds())
    return min(taken[1:]) / 2
