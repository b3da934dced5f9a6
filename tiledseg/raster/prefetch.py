"""Loading ahead of the consumer: in order, bounded, and gone when the consumer is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def prefetch(items: Iterable[T], load: Callable[[T], S], threads: int, depth: int) -> Iterator[S]:
    """Yield `load(item)` for each item, in the order of `items`, with up to `depth` loads running or waiting.

    `items` is drawn in the consumer's thread and never more than `depth` ahead, so it may be endless. An exception of
    `load`, or of `items` itself, is raised at its own place: everything before it is yielded first. Threads start at
    the first `next` and are joined when the iterator ends, is closed, or is dropped; loads not yet begun are then
    dropped, one that runs is waited for. `threads` 0 loads in the consumer's thread.
    """
    if threads == 0:
        yield from map(load, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    drawn, waiting = iter(items), deque[Future[S]]()
    failure: BaseException | None = None
    try:
        while True:
            while failure is None and len(waiting) < depth:
                try:
                    waiting.append(pool.submit(load, next(drawn)))
                except Exception as error:  # StopIteration too; raised after the loads that are under way
                    failure = error
            if not waiting:
                break
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure
