"""Work of which each piece keeps one core busy, shared out among all cores that torch may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from tiledseg.models.layers.on_cpu.followed import is_followed

Work = Callable[[], torch.Tensor]


def can_share() -> bool:
    """Whether torch has more than one thread, and nobody follows what this one computes."""
    return torch.get_num_threads() > 1 and not is_followed() and _threads_to_use() is not None


def side_by_side(pieces: Sequence[Work]) -> list[torch.Tensor]:
    """What each gives, in their order, each computed by one thread without a graph; who is free takes the next. Raises
    what a piece raises, after all have ended: no thread reads or writes a tensor any more."""
    use, threads = _threads_to_use(), torch.get_num_threads()
    assert use is not None, "can_share"
    rest = iter(enumerate(pieces))  # `next` of it holds the interpreter's lock

    @torch.no_grad()
    def take() -> dict[int, torch.Tensor]:
        return {k: piece() for k, piece in rest}

    others = [_pool(os.getpid(), threads - 1).submit(take) for _ in range(threads - 1)]
    use(1)
    try:
        made = take()
    finally:
        use(threads)
        errors = [other.exception() for other in others]
    for error in filter(None, errors):
        raise error
    for other in others:
        made |= other.result()
    return [made[k] for k in range(len(pieces))]


@cache
def _threads_to_use() -> Callable[[int], None] | None:
    """OpenMP's own call, which is about the thread that calls it; torch's clears what oneDNN has prepared. None where
    torch has no OpenMP."""
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process: a fork does not take threads along. They last, with what oneDNN has prepared in them."""
    return ThreadPoolExecutor(threads, "gradient", _begin)


def _begin() -> None:
    use = _threads_to_use()
    assert use is not None, "can_share"
    torch.get_num_threads()  # a thread's first question sets what it tells
    use(1)
