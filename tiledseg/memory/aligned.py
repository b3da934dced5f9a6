"""Memory whose first byte lies at a page's begin, as direct input and output wants it."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from tiledseg.memory.slots import PAGE, whole_pages

Bytes = NDArray[np.uint8]


_HUGE = 2 << 20  # bytes of a large page: fewer of them are faster to map and to copy to


def aligned_bytes(count: int) -> Bytes:
    """`count` zero bytes of anonymous memory, mapped for them alone: whole pages, given back to the system with the
    last array over them. Raises OSError (ENOMEM) where the system has no room.

    The mapping is shared with processes that are forked later: a private page that is written while a fork copies it
    may take a direct read to the wrong process on older kernels.
    """
    mapping = mmap.mmap(-1, whole_pages(count))
    if count >= _HUGE:
        with contextlib.suppress(OSError):  # where the system has none
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)[:count]


def is_aligned(array: Bytes) -> bool:
    """Whether its first byte and its length are those of whole pages."""
    return int(array.ctypes.data) % PAGE == 0 and len(array) % PAGE == 0
