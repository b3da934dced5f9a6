"""How many connections a rank holds: what its limit of open files must leave room for. Pure.

Gloo connects two ranks when they first talk: its sums and gathers are rings, its broadcasts trees, and messages have
the peers of the mesh. So a rank has a few connections for each doubling of the ranks, not one for each rank. Only the
store, which one process keeps, has connections of all: a rank's own, and its watch's.
"""

from __future__ import annotations

STORE_CONNECTIONS = 2  # of each rank, to the store
_FILES = 64  # images, reading threads, the run's files, libraries
_GROUPS = 4  # of which a rank is a member: the whole, and those of image, stage and pipeline


def open_files_needed(size: int, keeps_store: bool, peers: int = 0) -> int:
    """Of a rank among `size` that sends messages to `peers` others; `keeps_store`: all ranks connect to it."""
    ring_and_trees = 2 + 2 * (size - 1).bit_length()
    return _FILES + _GROUPS * ring_and_trees + peers + (STORE_CONNECTIONS * size if keeps_store else 0)
