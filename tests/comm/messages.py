"""Tensors whose values tell who sent them to whom, for the tests of messages."""

from collections.abc import Callable, Sequence

import torch

from tiledseg.comm.collectives import Message
from tiledseg.comm.point_to_point import PointToPoint


def letter(source: int, target: int, count: int, number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`count` values, other ones for each source, target and number: from -7 to 7, exact in every dtype."""
    generator = torch.Generator().manual_seed(source * 10_007 + target * 101 + number)
    return torch.randint(-7, 8, (count,), generator=generator).to(dtype)


def blank(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What no letter holds."""
    return torch.full((count,), 99, dtype=dtype)


class StagedMessages(PointToPoint):
    """Messages that go through host buffers, as a GPU's would."""

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.nbytes, dtype=torch.uint8)


def swap_letters(
    messages: PointToPoint,
    rank: int,
    pairs: Sequence[tuple[int, int]],
    count_of: Callable[[int, int], int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """One exchange of a letter for each (source, target) of `pairs`; asserts what this rank gets."""
    sends = [Message(b, letter(a, b, count_of(a, b), dtype=dtype)) for a, b in pairs if a == rank]
    receives = [Message(a, blank(count_of(a, b), dtype)) for a, b in pairs if b == rank]
    messages.start(sends, receives).wait()
    for source, got in receives:
        assert torch.equal(got, letter(source, rank, count_of(source, rank), dtype=dtype))
