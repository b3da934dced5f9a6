"""The start of many ranks in one process, each a thread that walks the session's own code over real Gloo; what they
ask of the store is counted.

    python -m tests.comm.many_ranks 32 64 128

prints as JSON what each rank and all of them did, for each of the numbers of ranks. torch keeps the groups of a process
in one place: here each thread has a place of its own. Reverse look-ups of names, which a TCP store makes for each
connection, would take longer than all else, so the ranks share a store in memory; not torch's own, whose every write
wakes all who wait for anything.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

from tiledseg.comm import rendezvous
from tiledseg.comm.axes import open_axes
from tiledseg.comm.launch import Launch
from tiledseg.comm.session import open_mesh
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.geometry.sharing.mesh_shape import MeshShape

RANKS_OF_A_NODE = 6


class Keys:
    """What a store keeps, for threads; a write wakes those who wait for its key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._there: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            self._there[key].set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            self._there[key].set()
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._lock:
                there = self._there[key]
            there.wait()


class CountingStore(dist.Store):  # type: ignore[misc]
    """A rank's view of a store: each operation and its bytes (keys and values) are counted."""

    def __init__(self, store: Keys, count: Counter[str]) -> None:
        super().__init__()
        self._store, self._count = store, count

    def _one(self, *parts: bytes | str) -> None:
        self._count["operations"] += 1
        self._count["bytes"] += sum(map(len, parts))

    def set(self, key: str, value: bytes) -> None:
        self._one(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._one(key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._one(key)
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        self._one(*keys)
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], *timeout: object) -> None:
        self._one(*keys)
        self._store.wait(keys)

    def set_timeout(self, timeout: object) -> None:
        """Tests end by their own."""


@dataclass
class Ranks:
    """What the ranks did, by rank; the failures of those that failed."""

    counts: list[Counter[str]]
    failures: list[str]


def gather_own(found: list[object], own: object, group: dist.ProcessGroup | None = None) -> None:
    """In place of `all_gather_object`: a sum, which connects the same ring. The gather's messages and pickled objects,
    the square of the ranks, take longer than all else; they are alike here, and so is the count with them."""
    dist.all_reduce(torch.zeros(1), group=group)
    found[:] = [own] * len(found)


def start_ranks(size: int, shape: MeshShape) -> Ranks:
    """All of a run's communicators are opened and used by `size` ranks, as a training step uses them."""
    store = Keys()
    ranks = Ranks([Counter() for _ in range(size)], [])
    views = [CountingStore(store, count) for count in ranks.counts]  # C++ holds them without their Python part
    rendezvous.open_store = lambda launch, environ, world: views[launch.rank]  # type: ignore[assignment]

    together = threading.Barrier(size)

    def rank(number: int) -> None:
        try:
            local = number % RANKS_OF_A_NODE
            _live(Launch(number, size, local, RANKS_OF_A_NODE, "torchrun"), shape, together)
        except BaseException:
            ranks.failures.append(f"rank {number}: {traceback.format_exc()}")
            together.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


def _live(launch: Launch, shape: MeshShape, together: threading.Barrier) -> None:
    """`together`: threads that are all at the same part of it take half the time."""
    mesh = open_mesh(launch, os.environ, "gloo")
    together.wait()
    assert mesh.on_root(lambda: "prepared") == "prepared"
    together.wait()
    axes = open_axes(mesh, shape)
    together.wait()
    x = torch.ones(1)
    axes.weights.all_reduce_sum(x).wait()
    assert x.item() == shape.ranks / shape.stages
    together.wait()
    y = torch.ones(1)
    axes.image.all_reduce_sum(y).wait()
    assert y.item() == shape.ranks_per_image
    together.wait()
    _exchange(launch.rank, axes, shape)
    together.wait()
    axes.close()
    mesh.close()


def _exchange(rank: int, axes, shape: MeshShape) -> None:  # type: ignore[no-untyped-def]
    """A message to and from each neighbour in the mesh."""
    row, col = axes.position.row, axes.position.col
    around = [(row + r, col + c) for r in (-1, 0, 1) for c in (-1, 0, 1) if (r, c) != (0, 0)]
    peers = [axes.rank_at(r, c) for r, c in around if 0 <= r < shape.rows and 0 <= c < shape.cols]
    received = [torch.zeros(1) for _ in peers]
    sends = [Message(peer, torch.tensor([float(rank)])) for peer in peers]
    axes.point_to_point.start(sends, [Message(*pair) for pair in zip(peers, received, strict=True)]).wait()
    assert [int(x.item()) for x in received] == peers


def main(sizes: Sequence[int]) -> int:
    """Prints operations and bytes by the number of ranks: of each rank, and of all."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    _install_threaded_pg()
    dist.all_gather_object = gather_own
    for name in ("_register_process_group", "_unregister_process_group"):  # by name in the process, for compiled graphs
        setattr(distributed_c10d, name, lambda *given: None)
    found = {size: start_ranks(size, MeshShape(size // 16, 2, 4, 2)) for size in sizes}
    failures = [failure for ranks in found.values() for failure in ranks.failures]
    sys.stderr.write("\n".join(failures[:1]))
    counted = {size: {"ranks": ranks.counts, "total": sum(ranks.counts, Counter())} for size, ranks in found.items()}
    print(json.dumps(counted))
    return int(bool(failures))


if __name__ == "__main__":
    code = main([int(text) for text in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(code)
