"""The measured link between stages: what it is made of, and that all ranks know the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports import stopwatch
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.work import Work
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.pipeline.layer_times import MeasuredLink, measure_link, slowest_link

DELAY = 0.5


class _Slow(PointToPoint):
    """Messages whose start takes a while, and longer if they are large, by a clock that knows of nothing else."""

    def __init__(self, inner: PointToPoint, per_byte: float) -> None:
        super().__init__(inner._carrier)
        self._per_byte = per_byte
        self.now = 0.0

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        self.now += DELAY + self._per_byte * sum(message.tensor.nbytes for message in sends)
        return super().start(sends, receives)


def test_seconds_of_a_message() -> None:
    assert MeasuredLink(2.0, 0.5).seconds(10) == 7.0


@pytest.mark.mpi
def test_all_ranks_know_the_same_link(mesh: Mesh) -> None:
    """Of each number of stages that the job has ranks for; ranks outside the mesh know it too."""
    for stages in range(2, mesh.size + 1):
        link = slowest_link(mesh.communicator, MeshShape(mesh.size // stages, 1, 1, stages), mesh.device)
        assert all(other == link for other in mesh.communicator.gather_objects(link))
        assert 0 < link.latency < 10
        assert 0 <= link.per_byte < 1e-6, "a megabyte a second, even here"


@pytest.mark.mpi
def test_the_parts_of_a_message_are_told_apart(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay of each message is latency, one that grows with its bytes is not: of both ways one rank sends."""
    if mesh.size < 2:
        pytest.skip("needs 2 ranks")
    messages = _Slow(mesh.communicator.point_to_point(), per_byte=1e-6)
    monkeypatch.setattr(stopwatch, "mark", lambda device: messages.now)
    if mesh.rank < 2:
        link = measure_link(messages, 1 - mesh.rank, mesh.rank == 0, torch.device("cpu"))
        assert link.latency == pytest.approx(DELAY, rel=0.01)
        assert link.per_byte == pytest.approx(0.5e-6)
