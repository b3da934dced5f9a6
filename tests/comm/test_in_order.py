"""The replay of NCCL's queues: it ends where ranks agree on an order, and names what stands where they do not."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.comm.in_order import Operation, RecordedCommunicator, standstill
from tiledseg.comm.collectives import Communicator, Message, RehearsedCommunicator, Turns, Work
from tiledseg.comm.point_to_point import PointToPoint


def recorded(rank: int, work: Callable[[Communicator, Communicator, int], None]) -> list[Operation]:
    """Return the record of `work` on a job of two ranks, without peers, and on a part of both in reverse."""
    record: list[Operation] = []
    whole = RecordedCommunicator(RehearsedCommunicator(rank, 2), record, "the job", range(2))
    work(whole, whole.split([[1, 0]]), rank)
    return record


def ring(messages: PointToPoint, rank: int) -> Work:
    """Start a message each way between the two ranks."""
    return messages.start([Message(1 - rank, torch.ones(3))], [Message(1 - rank, torch.empty(3))])


def in_one_order(whole: Communicator, part: Communicator, rank: int) -> None:
    """Sums of both communicators, messages and objects, waited for late."""
    works = [
        whole.all_reduce_sum(torch.ones(2)),
        part.all_reduce_sum(torch.ones(2)),
        ring(PointToPoint(whole), rank),
    ]
    part.broadcast(torch.ones(2))
    whole.gather_objects(rank)
    for work in reversed(works):
        work.wait()
    part.close()


def swapped(whole: Communicator, part: Communicator, rank: int) -> None:
    messages = PointToPoint(whole)
    steps = [lambda: whole.all_reduce_sum(torch.ones(2)), lambda: ring(messages, rank)]
    for work in [step() for step in steps[:: 1 - 2 * rank]]:
        work.wait()


def one_more_message(whole: Communicator, part: Communicator, rank: int) -> None:
    for _ in range(1 + rank):
        ring(PointToPoint(whole), rank).wait()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (in_one_order, None),
        (swapped, "rank 0: sum of [2] over the job of [0, 1]; rank 1: messages send 1-0 + get 0-1"),
        (one_more_message, "rank 0: nothing; rank 1: opening of messages over the job of [0, 1]"),
        (
            lambda whole, _, rank: whole.gather_objects(rank) if rank else whole.all_reduce_sum(torch.ones(2)).wait(),
            "rank 0: sum of [2] over the job of [0, 1]; rank 1: gathering of objects over the job of [0, 1]",
        ),
    ],
)
def test_a_standstill_is_named(work: Callable[[Communicator, Communicator, int], None], words: str | None) -> None:
    assert standstill([recorded(rank, work) for rank in range(2)]) == words


class Started(Communicator):
    """A communicator that notes for whose sums and messages somebody has waited."""

    def __init__(self, waited: list[Communicator]) -> None:
        self._waited = waited

    def _sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: self._waited.append(self)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]:
        return lambda: self._waited.append(self)

    def _split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return Started(self._waited)


def test_communicators_take_turns() -> None:
    """GPUs need not keep the order of two communicators' operations: a rank waits for one before the other starts."""
    waited: list[Communicator] = []
    whole = Started(waited)
    whole.turns = Turns()
    part, messages = whole.split([[0]]), PointToPoint(whole)
    for start in (
        lambda: part.all_reduce_sum(torch.ones(2)),
        lambda: part.broadcast(torch.ones(2)),
        lambda: ring(messages, 1),
        lambda: whole.split([[0]]),
        lambda: PointToPoint(whole),
        part.close,
    ):
        works = [whole.all_reduce_sum(torch.ones(2)) for _ in range(2)]
        assert waited == []
        start()
        assert waited == [whole, whole]
        whole.split([[0]])
        for work in works:
            work.wait()
        waited.clear()
    ring(messages, 1)
    part.all_reduce_sum(torch.ones(2))
    assert waited == [whole], "messages are waited for too"
