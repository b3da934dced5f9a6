"""The laws of messages: what is sent arrives, in order, whatever carries it and however many are under way."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from tests.comm.messages import StagedMessages, blank, letter, swap_letters
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Message, MessageMeter, PointToPoint, as_bytes
from tiledseg.memory import device as stopwatch
from tiledseg.memory.device import Stopwatch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(params=["plain", "staged"])
def messages(request: pytest.FixtureRequest, mesh: Mesh) -> PointToPoint:
    """As they are, and through host buffers."""
    return mesh.communicator.point_to_point() if request.param == "plain" else StagedMessages(mesh.communicator)


def all_pairs(size: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(size), 2))


@pytest.mark.mpi
@pytest.mark.parametrize("largest", [9, 100_000])
def test_all_to_all_with_unequal_and_empty_messages(mesh: Mesh, messages: PointToPoint, largest: int) -> None:
    """Counts reach the libraries' ways for short and for long messages; those of no values are not sent."""
    counts = {(a, b): 0 if (a + 2 * b) % 4 == 0 else 1 + (largest * (a + 3 * b)) // 7 for a, b in all_pairs(mesh.size)}
    swap_letters(messages, mesh.rank, all_pairs(mesh.size), lambda a, b: counts[a, b])
    mine = [count for (a, _), count in counts.items() if a == mesh.rank and count]
    assert (messages.meter.messages, messages.meter.bytes) == (len(mine), 4 * sum(mine))


@pytest.mark.mpi(min_size=2)
def test_every_dtype(mesh: Mesh, messages: PointToPoint) -> None:
    for dtype in DTYPES:
        swap_letters(messages, mesh.rank, all_pairs(mesh.size), lambda a, b: 70 + a, dtype)


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
def test_random_exchanges_end(mesh: Mesh, messages: PointToPoint) -> None:
    """Any pairs, any sizes, several messages of a pair, up to four exchanges under way, waited for in an order of each
    rank's own, ranks that come late: all arrives in its place and none hangs."""
    plan, own = random.Random(5), random.Random(mesh.rank)
    pairs = all_pairs(mesh.size)
    started: list[tuple[object, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def settle(position: int) -> None:
        work, expected = started.pop(position)
        work.wait()  # type: ignore[attr-defined]
        for got, right in expected:
            assert torch.equal(got, right)

    for number in range(25):
        drawn = [(*plan.choice(pairs), plan.choice([0, 1, 17, 3000, 60_000])) for _ in range(plan.randrange(9))]
        letters = [(a, b, letter(a, b, count, number * 10 + i)) for i, (a, b, count) in enumerate(drawn)]
        expected = [(a, blank(len(x)), x) for a, b, x in letters if b == mesh.rank]
        sends = [Message(b, x) for a, b, x in letters if a == mesh.rank]
        work = messages.start(sends, [Message(a, got) for a, got, _ in expected])
        started.append((work, [(got, x) for _, got, x in expected]))
        if own.random() < 0.1:
            time.sleep(0.003)
        while len(started) > own.randrange(4):
            settle(own.randrange(len(started)))
    while started:
        settle(0)


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
def test_adjoint_of_a_shift_is_the_shift_back(mesh: Mesh, messages: PointToPoint) -> None:
    """<S x, y> = <x, S* y> over all ranks, where S gives each rank its left neighbour's x and the first rank zeros."""

    def shift(tensor: torch.Tensor, step: int) -> torch.Tensor:
        target, source, result = mesh.rank + step, mesh.rank - step, torch.zeros_like(tensor)
        sends = [Message(target, tensor)] if 0 <= target < mesh.size else []
        receives = [Message(source, result)] if 0 <= source < mesh.size else []
        messages.start(sends, receives).wait()
        return result

    x, y = (letter(mesh.rank, number, 501, dtype=torch.float64) for number in (0, 1))
    for step in range(1, mesh.size + 1):
        left = sum(mesh.communicator.gather_objects(torch.dot(shift(x, step), y).item()))
        right = sum(mesh.communicator.gather_objects(torch.dot(x, shift(y, -step)).item()))
        assert left == right
        assert (left != 0) == (step < mesh.size)


@pytest.mark.mpi
def test_nothing_to_say(mesh: Mesh, messages: PointToPoint) -> None:
    """Only this rank need start such an exchange, since no message is sent."""
    if mesh.is_root:
        messages.start([], []).wait()
        if mesh.size > 1:
            messages.start([Message(1, torch.empty(3, 0))], [Message(1, torch.empty(0))]).wait()
    assert messages.meter == MessageMeter()


@pytest.mark.mpi(min_size=2)
def test_traffic(mesh: Mesh, messages: PointToPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of what was sent, and the time waited: until a late rank has come. A second wait does nothing."""
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    marks: list[float] = []
    monkeypatch.setattr(stopwatch, "mark", lambda device: marks.append(time.perf_counter()) or marks[-1])
    mesh.communicator.barrier()
    time.sleep(0.1 if mesh.is_root else 0)
    came = time.perf_counter()
    got = blank(14)
    work = messages.start([Message(right, torch.ones(7, dtype=torch.float64))], [Message(left, got)])
    assert (messages.meter.messages, messages.meter.bytes, messages.meter.seconds) == (1, 56, 0.0)
    work.wait()
    assert messages.meter.seconds == marks[1] - marks[0] > 0
    hosts, times = zip(*mesh.communicator.gather_objects((mesh.host, came)), strict=True)
    assert hosts[left] != mesh.host or marks[1] > times[left], "it waits no shorter; who comes late itself, not at all"
    got.fill_(5)
    work.wait()
    assert got.eq(5).all()
    assert len(marks) == 2
    messages.meter.reset()
    assert (messages.meter, messages.meter.seconds) == (MessageMeter(), 0.0)


@pytest.mark.mpi(min_size=2)
def test_messages_longer_than_a_piece(mesh: Mesh, messages: PointToPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI counts with 31 bits, so that long messages go in pieces; the same law for pieces of five bytes."""
    monkeypatch.setattr("tiledseg.comm.transport_mpi._PIECE", 5)
    swap_letters(messages, mesh.rank, all_pairs(mesh.size), lambda a, b: 11 + 4 * a + b)


@pytest.mark.cuda
@pytest.mark.mpi(min_size=2)
def test_gpu_tensors(mesh: Mesh, messages: PointToPoint) -> None:
    """Through host buffers, right after the kernels that make what is sent."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    got = torch.zeros(100_001, device=mesh.device)
    sent = letter(mesh.rank, right, 100_001).to(mesh.device) * 2 + 1
    messages.start([Message(right, sent)], [Message(left, got)]).wait()
    assert torch.equal(got.cpu(), letter(left, mesh.rank, 100_001) * 2 + 1)


def test_bytes_of_a_single_element_with_a_stride() -> None:
    """It counts as contiguous; its bytes are a view of it, at its place in the storage."""
    whole = torch.arange(12.0).reshape(3, 4)
    corner = whole.as_strided((1,), (7,), 6)
    assert corner.is_contiguous()
    as_bytes(corner).copy_(as_bytes(torch.tensor(-1.5)))
    assert whole[1, 2] == -1.5
    assert whole.sum() == 66 - 6 - 1.5


def test_the_devices_time_counts_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is where the stream stands, which the host reads only when the seconds are asked for, or spans are many:
    bubbles were negative since the host left before the GPU was done."""
    given, reads = 0.0, 0

    def between(begin: float, end: float) -> float:
        nonlocal reads
        reads += 1
        return end - begin

    monkeypatch.setattr(stopwatch, "mark", lambda device: given)
    monkeypatch.setattr(stopwatch, "between", between)
    monkeypatch.setattr(stopwatch, "_MOST_SPANS", 4)
    whole, busy = (Stopwatch(torch.device("cuda", 0)) for _ in range(2))
    with whole.running():
        for _ in range(3):
            with busy.running():
                given += 5.0
            given += 1.0  # waits for a message
    assert reads == 0
    assert (whole.seconds(), busy.seconds(), reads) == (18.0, 15.0, 4)
    for _ in range(4):
        with busy.running():
            given += 1.0
    assert reads == 8
    busy.reset()
    assert busy.seconds() == 0.0
