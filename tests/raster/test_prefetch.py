from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tiledseg.raster.mirrored_reader import prefetch


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize(("threads", "depth"), [(0, 1), (1, 2), (3, 1), (3, 5)])
def test_keeps_the_order_whatever_the_loads_take(threads: int, depth: int) -> None:
    def load(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(prefetch(range(20), load, threads, depth)) == [i * i for i in range(20)]
    assert not alive()


def test_draws_no_more_than_depth_ahead_from_endless_items() -> None:
    drawn = []

    def endless() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    loaded = prefetch(endless(), lambda item: item, threads=2, depth=3)
    assert [next(loaded) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(drawn) == 5 + 3 - 1
    loaded.close()
    assert not alive()
    meet = threading.Barrier(2, timeout=100)  # loads overlap
    assert list(prefetch(range(4), lambda item: meet.wait() < 2, threads=2, depth=2)) == [True] * 4


def test_an_error_surfaces_at_its_place() -> None:
    """An error of a load, or of the items, comes behind the loads before it."""

    def load(item: int) -> int:
        if item == 3:
            raise ValueError("item 3")
        return item

    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("item 3")

    for drawn, loads in ((range(10), load), (items(), lambda item: item)):
        loaded = prefetch(drawn, loads, threads=2, depth=4)
        assert [next(loaded) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="item 3"):
            next(loaded)
        assert not alive()
        assert list(loaded) == []


def test_closing_early_drops_what_has_not_begun_and_ends_the_threads() -> None:
    """All of the fifty that are under way would take five seconds. An iterator that is dropped is closed."""
    begun = []

    def load(item: int) -> int:
        begun.append(item)
        time.sleep(0.1)
        return item

    loaded = prefetch(range(100), load, threads=1, depth=50)
    assert next(loaded) == 0
    loaded.close()
    assert not alive()
    assert len(begun) < 50
    loaded = prefetch(range(100), load, threads=1, depth=50)
    next(loaded)
    del loaded
    assert not alive()
