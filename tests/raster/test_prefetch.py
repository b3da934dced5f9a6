from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tiledseg.errors import ConfigError
from tiledseg.raster.prefetch import prefetch


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
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


def test_loads_overlap() -> None:
    meet = threading.Barrier(2, timeout=100)
    assert list(prefetch(range(4), lambda item: meet.wait() < 2, threads=2, depth=2)) == [True] * 4


def test_an_error_of_a_load_surfaces_at_its_place() -> None:
    def load(item: int) -> int:
        if item == 3:
            raise ValueError("item 3")
        time.sleep(0.01 if item < 3 else 0)
        return item

    loaded = prefetch(range(10), load, threads=2, depth=4)
    assert [next(loaded) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="item 3"):
        next(loaded)
    assert not alive()
    assert list(loaded) == []


def test_an_error_of_the_items_surfaces_behind_the_loads_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        raise RuntimeError("no more")

    loaded = prefetch(items(), lambda item: item, threads=1, depth=5)
    assert [next(loaded), next(loaded)] == [0, 1]
    with pytest.raises(RuntimeError, match="no more"):
        next(loaded)
    assert not alive()


def test_closing_early_drops_what_has_not_begun_and_ends_the_threads() -> None:
    """Of the fifty that are under way all would take five seconds."""
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


def test_a_dropped_iterator_leaves_no_thread() -> None:
    for item in prefetch(range(100), lambda item: item, threads=2, depth=4):
        if item == 3:
            break
    del item
    deadline = time.monotonic() + 60
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive()


@pytest.mark.parametrize(("threads", "depth"), [(-1, 1), (1, 0)])
def test_refuses_what_cannot_work(threads: int, depth: int) -> None:
    with pytest.raises(ConfigError, match=f"{threads} threads, depth {depth}"):
        next(prefetch([1], lambda item: item, threads, depth))
