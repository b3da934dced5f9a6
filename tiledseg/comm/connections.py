"""How many connections a rank holds, which its limit of open files must leave room for, and what ranks ask of the
store until they are made. Pure.

Gloo connects two ranks when they first talk: its sums and gathers are rings, its broadcasts trees, and messages have
the peers of the mesh. So a rank has a few connections for each doubling of the ranks, not one for each rank. Only the
store, which one process keeps, has connections of all: a rank's own, and its watch's.
"""

from __future__ import annotations

STORE_CONNECTIONS = 2  # of each rank, to the store
_FILES = 64  # images, reading threads, the run's files, libraries
_MEETING = 12  # operations: of a rank that meets all others, with a ring and trees
_GROUP = 5  # operations: of a further group, with a ring
_GROUPS = 4  # of which a rank is a member: the whole, and those of image, stage and pipeline


def open_files_needed(size: int, keeps_store: bool, peers: int = 0) -> int:
    """Of a rank among `size` that sends messages to `peers` others; `keeps_store`: all ranks connect to it."""
    ring_and_trees = 2 + 2 * (size - 1).bit_length()
    return _FILES + _GROUPS * ring_and_trees + peers + (STORE_CONNECTIONS * size if keeps_store else 0)


def store_operations(size: int, groups: int, peers: int) -> int:
    """At most, of all ranks together, from their meeting until their first step has ended: `groups` that each is in,
    the whole among them, and `peers` of its messages. Connections are made when they are first used, each by two
    operations of either end. Of real Gloo among 32 and 256 ranks it is 0.85 and 0.89 of this
    (`tests/comm/many_ranks.py`)."""
    return size * (_MEETING + _GROUP * (groups - 1) + 2 * peers)
