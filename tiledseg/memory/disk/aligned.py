"""Memory whose first byte lies at a page's begin, as direct input and output wants it."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from tiledseg.memory.disk.slots import PAGE, whole_pages

Bytes = NDArray[np.uint8]


def aligned_bytes(count: int) -> Bytes:
    """`count` zero bytes of anonymous memory, mapped for them alone: whole pages, given back to the system with the
    last array over them. Raises OSError (ENOMEM) where the system has no room.

    The mapping is shared with processes that are forked later: a private page that is written while a fork copies it
    may take a direct read to the wrong process on older kernels.
    """
    return np.frombuffer(mmap.mmap(-1, whole_pages(count)), np.uint8)[:count]


def aligned_of_heap(count: int) -> Bytes:
    """The same of the heap, and not zero: where tensors have been let go it is what they have left, whose pages are
    there. New ones would cost more than the copy into them."""
    array = np.empty(whole_pages(count) + PAGE, np.uint8)
    begin = -int(array.ctypes.data) % PAGE
    return array[begin : begin + count]


def is_aligned(array: Bytes) -> bool:
    """Whether its first byte and its length are those of whole pages."""
    return int(array.ctypes.data) % PAGE == 0 and len(array) % PAGE == 0
