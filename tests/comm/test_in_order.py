"""The in-order transport itself: it carries what the real ones carry, it hangs where it must, and says so in time."""

from __future__ import annotations

import time

import pytest
import torch

from tests.comm.in_order import in_order
from tests.comm.in_order_queues import Order
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import Work
from tiledseg.errors import CommunicationError

EVERY_ORDER = pytest.mark.parametrize("order", Order, ids=lambda order: order.name)
SILENCE = 5.0  # seconds without a word from any rank, after which what must hang has hung


def ring(mesh: Mesh, turn: int = 1) -> tuple[list[Message], list[Message]]:
    """A send to the rank after this one and a receive from the one before it."""
    after, before = (mesh.rank + turn) % mesh.size, (mesh.rank - turn) % mesh.size
    return [Message(after, torch.full((3,), float(mesh.rank)))], [Message(before, torch.empty(3))]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("order", "turns"), [(Order.QUEUES, False), (Order.QUEUE, False), (Order.QUEUE, True), (Order.ANY, True)]
)
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
        assert messages.meter.messages == 1
        assert messages.meter.bytes == 12
        messages.close()
        part.close()


def swapped(mesh: Mesh, ordered: Mesh) -> list[Work]:
    """A sum over two communicators and a ring of messages; on the last rank the messages come first."""
    sends, receives = ring(mesh)
    messages = ordered.communicator.point_to_point()
    total = torch.ones(2)
    steps = [lambda: ordered.communicator.all_reduce_sum(total), lambda: messages.start(sends, receives)]
    return [step() for step in (steps[::-1] if mesh.rank == mesh.size - 1 else steps)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("order", "turns"), [(Order.QUEUE, False), (Order.ANY, True)])
def test_two_operations_swapped_on_one_rank_are_a_hang_that_names_what_every_rank_is_at(
    meshes: dict[str, Mesh], order: Order, turns: bool
) -> None:
    mesh = meshes["gloo"]
    begun = time.monotonic()

    def hang() -> None:
        with in_order(mesh, order, turns, SILENCE) as ordered:
            for work in swapped(mesh, ordered):
                work.wait()

    with pytest.raises(CommunicationError, match="the ranks wait for each other") as caught:
        hang()
    found = mesh.communicator.gather_objects(mesh.rank)  # before anything that one rank alone may fail
    assert found == list(range(mesh.size)), "the processes go on, and so does what carries the bytes"
    line = str(caught.value)
    assert "\n" not in line
    for rank in range(mesh.size):
        what = "messages [3] to rank" if rank == mesh.size - 1 else "all-reduce 1 of float32[2] over ranks [0, 1"
        assert f"rank {rank}: {what}" in line
    assert time.monotonic() - begun < 60, "not by a time limit of the test or of the real transport"


@pytest.mark.mpi(min_size=2)
def test_queues_that_progress_independently_do_not_mind_the_swap(meshes: dict[str, Mesh]) -> None:
    with in_order(meshes["gloo"], Order.QUEUES) as ordered:
        for work in swapped(meshes["gloo"], ordered):
            work.wait()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("turns", [False, True])
def test_two_communicators_in_flight_hang_unless_they_take_turns(meshes: dict[str, Mesh], turns: bool) -> None:
    """What backward did: a gradient sum under way, then a halo. All ranks start them in one order; GPUs need not."""
    mesh = meshes["gloo"]

    def sum_and_halo() -> None:
        with in_order(mesh, Order.ANY, turns, 60.0 if turns else SILENCE) as ordered:
            sends, receives = ring(mesh)
            messages = ordered.communicator.point_to_point()
            total = torch.ones(2)
            work = ordered.communicator.all_reduce_sum(total)
            messages.start(sends, receives).wait()
            work.wait()
            assert total.tolist() == [mesh.size] * 2

    if turns:
        sum_and_halo()
        return
    with pytest.raises(CommunicationError, match="the ranks wait for each other"):
        sum_and_halo()


@pytest.mark.mpi(min_size=2)
@EVERY_ORDER
def test_a_message_waits_until_its_receiver_has_come_to_it(meshes: dict[str, Mesh], order: Order) -> None:
    """However small it is: nothing is buffered. The receive stands after a sum that the sender joins only later."""
    mesh = meshes["gloo"]
    with in_order(mesh, order) as ordered:
        messages = ordered.communicator.point_to_point()
        part = ordered.communicator.split([[0, 1]])
        if mesh.rank > 1:
            part.close()
            return
        x = torch.ones(1)
        if mesh.rank == 0:
            sent = messages.start([Message(1, x)], [])
            time.sleep(0.3)
            waits = not sent.operation.done.is_set()  # type: ignore[attr-defined]
            part.gather_objects(None)
            sent.wait()
            assert waits
        else:
            part.gather_objects(None)
            messages.start([], [Message(0, x)]).wait()
        part.close()
