"""A device's tensors on their way to the host's memory, by lanes that are as late as they may be."""

from __future__ import annotations

import random

import pytest
import torch

from tests.memory.stores import LateMover, to_host
from tests.memory.test_pitfalls import chain, expected
from tests.memory.zoo import leaf
from tiledseg.errors import MemoryLimitError
from tiledseg.memory.mover import PAGE, Sent, store_rates
from tiledseg.memory.offload import Offload


def drawn(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_slots_that_are_used_again_hold_what_was_sent_last() -> None:
    """Bytes of any size go out and come back in any order, dropped and sent anew, while copies are late."""
    draw, sent = random.Random(3), dict[int, tuple[Sent, torch.Tensor]]()
    mover = LateMover(3)
    for number in range(400):
        if len(sent) > 6 or (sent and draw.random() < 0.4):
            each, data_P = sent.pop(draw.choice(list(sent)))
            if draw.random() < 0.7:
                brought = mover.bring(each)
                if draw.random() < 0.7:
                    brought.copying.wait()
                    assert torch.equal(brought.flat_P, data_P)
                else:
                    brought.copying.stop()  # nobody wants it any more
            mover.drop(each)
        else:
            flat_P = drawn(draw.choice([1, 100, PAGE, PAGE + 1, 5 * PAGE - 7]), number)
            sent[number] = mover.send(flat_P), flat_P
    mover.close()


def test_more_than_the_limit_is_refused_in_one_line() -> None:
    x = leaf(64, 64, step=1)
    with (
        pytest.raises(MemoryLimitError, match=r"store in the host's memory may have 40000 bytes.*give it at least \d+"),
        to_host(0, limit=40_000),
    ):
        expected(x, 8)


def test_what_a_device_has_waited_is_told() -> None:
    """The host has not waited for it: it is asked what the device did, before the end and at it."""
    x = leaf(64, 64, step=1)
    with to_host(0) as moving:
        expected(x, 8)
        before = moving.counted().waited_seconds
        assert before > 1  # a late lane counts a second for each copy that is waited for
        expected(x, 8)
    assert moving.figures.waited_seconds > before


def test_rates_are_those_of_bytes_both_ways() -> None:
    rates = store_rates(LateMover(0, 8 * PAGE, PAGE), 8 * PAGE, 2 * PAGE)
    assert rates.written > 0
    assert rates.read > 0


def test_nothing_is_left_after_an_error() -> None:
    x, mover = leaf(64, 64, step=1), LateMover(2, chunk=PAGE)

    def attempt() -> None:
        with Offload(lambda: mover, 0, 1):
            chain(x, 8)
            raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        attempt()
    assert not mover._host + mover.going_out + mover.coming_in
