"""The in-order transport itself: it carries what the real ones carry, it hangs where it must, and says so in time."""

from __future__ import annotations

import time

import pytest
import torch

from tests.comm.in_order import Order, in_order
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Message
from tiledseg.errors import CommunicationError

SILENCE = 2.0  # seconds without a word from any rank, after which what must hang has hung
HANGS = "the ranks wait for each other"


def ring(mesh: Mesh) -> tuple[list[Message], list[Message]]:
    """A send to the rank after this one and a receive from the one before it."""
    after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    return [Message(after, torch.full((3,), float(mesh.rank)))], [Message(before, torch.empty(3))]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("order", "turns"), [(Order.QUEUE, False), (Order.QUEUE, True), (Order.ANY, True)])
def test_sums_broadcasts_messages_and_objects_arrive(mesh: Mesh, order: Order, turns: bool) -> None:
    with in_order(mesh, order, turns) as ordered:
        whole = ordered.communicator
        part = whole.split([list(range(mesh.size - 1, -1, -1))])
        messages = whole.point_to_point()
        sums = [torch.full((2, 2), float(mesh.rank + i)) for i in range(4)]
        works = [(part if i % 2 else whole).all_reduce_sum(x) for i, x in enumerate(sums)]
        sends, receives = ring(mesh)
        works.append(messages.start(sends, receives))
        for work in reversed(works):
            work.wait()
        total = sum(range(mesh.size))
        assert [x[0, 0].item() for x in sums] == [total + i * mesh.size for i in range(4)]
        assert receives[0].tensor.tolist() == [(mesh.rank - 1) % mesh.size] * 3
        x = torch.tensor([mesh.rank])
        part.broadcast(x, source=0)
        assert x.item() == mesh.size - 1, "the parts' order is the given one"
        assert part.gather_objects(mesh.rank) == list(range(mesh.size - 1, -1, -1))
        assert whole.broadcast_object(mesh.rank) == 0
        assert (messages.meter.messages, messages.meter.bytes) == (1, 12)
        part.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("order", "turns", "swaps", "hangs"),
    [
        (Order.QUEUE, False, True, True),
        (Order.ANY, False, False, True),  # a gradient sum under way, then a halo: GPUs need not keep the order
        (Order.ANY, True, False, False),
    ],
)
def test_operations_hang_where_ranks_or_gpus_may_differ(
    meshes: dict[str, Mesh], order: Order, turns: bool, swaps: bool, hangs: bool
) -> None:
    """A sum and a ring of messages; with `swaps` the messages come first on the last rank. What hangs is named."""
    mesh = meshes["gloo"]
    begun, last = time.monotonic(), swaps and mesh.rank == mesh.size - 1

    def sum_and_ring() -> None:
        with in_order(mesh, order, turns, SILENCE if hangs else 60.0) as ordered:
            messages, total = ordered.communicator.point_to_point(), torch.ones(2)
            steps = [lambda: ordered.communicator.all_reduce_sum(total), lambda: messages.start(*ring(mesh))]
            works = [step() for step in (steps[::-1] if last else steps)]
            for work in works if swaps else works[::-1]:
                work.wait()
            assert total.tolist() == [mesh.size] * 2

    if not hangs:
        sum_and_ring()
        return
    with pytest.raises(CommunicationError, match=HANGS) as caught:
        sum_and_ring()
    found = mesh.communicator.gather_objects(mesh.rank)  # before anything that one rank alone may fail
    assert found == list(range(mesh.size)), "the processes go on, and so does what carries the bytes"
    assert "\n" not in str(caught.value)
    for rank in range(mesh.size if swaps else 0):
        what = "messages 12 bytes to rank" if rank == mesh.size - 1 else "all-reduce 1 of float32[2] over ranks [0, 1"
        assert f"rank {rank}: {what}" in str(caught.value)
    assert time.monotonic() - begun < 60, "not by a time limit of the test or of the real transport"
