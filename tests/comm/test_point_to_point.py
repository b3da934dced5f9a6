"""The laws of messages: what is sent arrives, in order, whatever carries it and however many are under way."""

import itertools
import time

import pytest
import torch

from tests.comm.messages import StagedMessages, blank, letter, swap_letters
from tiledseg.comm.collectives import Message, as_bytes
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.memory.device import Stopwatch


@pytest.fixture(params=["plain", "staged"])
def messages(request: pytest.FixtureRequest, mesh: Mesh) -> PointToPoint:
    """As they are, and through host buffers."""
    return PointToPoint(mesh.communicator) if request.param == "plain" else StagedMessages(mesh.communicator)


def all_pairs(size: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(size), 2))


@pytest.mark.mpi
@pytest.mark.parametrize("largest", [9, 100_000])
def test_all_to_all_with_unequal_and_empty_messages(mesh: Mesh, messages: PointToPoint, largest: int) -> None:
    """Counts reach the libraries' ways for short and for long messages; those of no values are not sent."""
    counts = {(a, b): 0 if (a + 2 * b) % 4 == 0 else 1 + (largest * (a + 3 * b)) // 7 for a, b in all_pairs(mesh.size)}
    swap_letters(messages, mesh.rank, all_pairs(mesh.size), lambda a, b: counts[a, b])
    mine = [count for (a, _), count in counts.items() if a == mesh.rank and count]
    assert (messages.messages, messages.bytes) == (len(mine), 4 * sum(mine))


@pytest.mark.mpi(min_size=2)
def test_bits_and_shapes_are_kept(mesh: Mesh, messages: PointToPoint) -> None:
    """Not-a-numbers, infinities and zeros of both signs; a part of a parameter, and a tensor of no dim."""
    patterns = torch.tensor([0x7FC00001, -0x3FFFFE, 0x7F800000, -0x80000000, 1, 0], dtype=torch.int32)
    weight = torch.nn.Parameter(patterns.view(torch.float32).reshape(2, 3).clone())
    whole, number = torch.zeros(4, 2, 3), torch.zeros((), dtype=torch.float64)
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    sends = [Message(right, weight), Message(right, torch.tensor(mesh.rank + 0.5, dtype=torch.float64))]
    messages.start(sends, [Message(left, whole[2]), Message(left, number)]).wait()
    assert torch.equal(whole[2].view(torch.int32).flatten(), patterns)
    assert whole[:2].abs().sum() + whole[3].abs().sum() == 0
    assert number.item() == left + 0.5


@pytest.mark.mpi(min_size=2)
def test_exchanges_in_flight_are_waited_for_in_any_order(mesh: Mesh, messages: PointToPoint) -> None:
    """Several messages of a pair, of unequal sizes and none, on ranks that come late: all arrives in its place."""
    started = []
    for number in range(4):
        counts = list(enumerate((17 * number + 1, 0, 60_000 // (number + 1))))
        letters = [(a, b, letter(a, b, n, 10 * number + i)) for a, b in all_pairs(mesh.size) for i, n in counts]
        received = [(a, blank(len(x)), x) for a, b, x in letters if b == mesh.rank]
        sends = [Message(b, x) for a, b, x in letters if a == mesh.rank]
        time.sleep(0.003 * mesh.rank)
        started.append((messages.start(sends, [Message(a, got) for a, got, _ in received]), received))
    for work, received in started[:: -1 if mesh.rank % 2 else 1]:
        work.wait()
        assert all(torch.equal(got, x) for _, got, x in received)


@pytest.mark.mpi(min_size=2)
def test_start_waits_for_nobody(mesh: Mesh, messages: PointToPoint) -> None:
    """Else long messages both ways would hang here: each rank reaches the barrier with its own not yet received."""
    pairs = all_pairs(mesh.size)
    receives = [Message(a, blank(100_000)) for a, b in pairs if b == mesh.rank]
    sends = [Message(b, letter(a, b, 100_000)) for a, b in pairs if a == mesh.rank]
    work = messages.start(sends, receives)
    mesh.communicator.barrier()
    mesh.communicator.all_reduce_sum(torch.ones(7)).wait()
    work.wait()
    for source, got in receives:
        assert torch.equal(got, letter(source, mesh.rank, 100_000))


@pytest.mark.mpi
def test_nothing_to_say(mesh: Mesh, messages: PointToPoint) -> None:
    """Only this rank need start such an exchange, since no message is sent."""
    if mesh.is_root:
        messages.start([], []).wait()
        if mesh.size > 1:
            messages.start([Message(1, torch.empty(3, 0))], [Message(1, torch.empty(0))]).wait()
    assert (messages.messages, messages.bytes) == (0, 0)


@pytest.mark.mpi(min_size=2)
def test_waits_are_measured_and_a_second_one_does_nothing(mesh: Mesh, messages: PointToPoint) -> None:
    right, left, got = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size, blank(14)
    mesh.communicator.barrier()
    time.sleep(0.1 if mesh.is_root else 0)
    work = messages.start([Message(right, torch.ones(7, dtype=torch.float64))], [Message(left, got)])
    assert messages.seconds == 0.0
    work.wait()
    assert messages.seconds > (0.05 if mesh.rank == 1 else 0)
    got.fill_(5)
    work.wait()
    assert got.eq(5).all()
    messages.reset()
    assert (messages.messages, messages.bytes, messages.seconds) == (0, 0, 0.0)


@pytest.mark.mpi(min_size=2)
def test_messages_longer_than_a_piece(mesh: Mesh, messages: PointToPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI counts with 31 bits, so that long messages go in pieces; the same law for pieces of five bytes."""
    monkeypatch.setattr("tiledseg.comm.transport_mpi._PIECE", 5)
    swap_letters(messages, mesh.rank, all_pairs(mesh.size), lambda a, b: 11 + 4 * a + b)


def test_bytes_of_a_single_element_with_a_stride() -> None:
    """It counts as contiguous; its bytes are a view of it, at its place in the storage."""
    whole = torch.arange(12.0).reshape(3, 4)
    corner = whole.as_strided((1,), (7,), 6)
    assert corner.is_contiguous()
    as_bytes(corner).copy_(as_bytes(torch.tensor(-1.5)))
    assert whole[1, 2] == -1.5
    assert whole.sum() == 66 - 6 - 1.5


def test_the_devices_time_counts_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is where the stream stands; the host reads it when the seconds are asked for, or spans are many."""
    now, reads = 0.0, 0

    def between(begin: float, end: float) -> float:
        nonlocal reads
        reads += 1
        return end - begin

    monkeypatch.setattr("tiledseg.memory.device.mark", lambda device: now)
    monkeypatch.setattr("tiledseg.memory.device.between", between)
    monkeypatch.setattr("tiledseg.memory.device._MOST_SPANS", 4)
    watch = Stopwatch(torch.device("cuda", 0))
    for number in range(5):
        assert reads == (4 if number == 4 else 0)
        with watch.running():
            now += 5.0
        now += 1.0  # waits for a message
    assert (watch.seconds(), reads) == (25.0, 5)
    watch.reset()
    assert watch.seconds() == 0.0
