"""The watch's own channel: reports of the ranks in the job's store, over a connection that nothing else waits on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tiledseg.comm.watching.verdict import Report, decode

T = TypeVar("T")

_PATIENCE = timedelta(minutes=5)  # to connect: on a busy machine a thread may stand still for seconds
_LAST_SECONDS = 30.0  # for the slowest rank to look for the last time


class Board:
    """Reports by rank. Every call returns within `seconds`, also where rank 0, who keeps the store, is stopped.

    The store's own calls may then wait forever (a wait that is given up asks the store to take it back), so each runs
    in a thread of its own, and while one has not come back there is no store. No call uses a collective or MPI. A
    failed one drops the connection, and the next one makes it anew. Not for several threads at once.
    """

    def __init__(self, store: dist.Store, environ: Mapping[str, str], seconds: float) -> None:
        base = store.underlying_store if isinstance(store, dist.PrefixStore) else store
        assert isinstance(base, dist.TCPStore), "the job's ranks meet at a TCP store"
        self._kept = store  # rank 0's ends with its last reference
        self._host, self._port = base.host, base.port
        self._prefix = f"watch {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun's store outlives a restart
        self._seconds = seconds
        self._connection: dist.Store | None = None
        self._last: threading.Thread | None = None

    def put(self, report: Report) -> None:
        """Replaces the rank's report, where the store answers."""
        self._call(lambda store: store.set(str(report.rank), report.encode()))

    def read(self, ranks: Sequence[int]) -> list[Report] | None:
        """The last reports of `ranks`, all of which have put one; None where the store does not answer."""
        texts = self._call(lambda store: store.multi_get([str(rank) for rank in ranks]))
        return [decode(text) for text in texts] if texts is not None else None

    def is_first_speaker(self) -> bool:
        """Whether this rank is the first to ask, so that one speaks for all; True where the store does not answer."""
        return self._call(lambda store: store.add("speakers", 1)) in (None, 1)

    def leave(self, await_ranks: int = 0) -> None:
        """Says that this rank asks no more; with `await_ranks` returns once so many have, or after half a minute.

        A store that ends while others ask it makes torch write a warning on each of them: seen on 64 ranks of 2 cores.
        """
        left = self._call(lambda store: store.add("left", 1))
        end = time.monotonic() + _LAST_SECONDS
        while left is not None and left < await_ranks and time.monotonic() < end:
            time.sleep(0.02)
            left = self._call(lambda store: store.add("left", 0))

    def is_first_to_ask(self) -> bool | None:
        """Whether this rank is the first to ask who is lost; None where the store does not answer."""
        number = self._call(lambda store: store.add("askers", 1))
        return number == 1 if number is not None else None

    def tell(self, words: str) -> None:
        """What the first found that asked."""
        self._call(lambda store: store.set("lost", words))

    def told(self) -> str:
        """What it told; empty where it has not yet, or where the store has gone since, as it does with rank 0."""
        words = self._call(lambda store: store.get("lost") if store.check(["lost"]) else b"")
        return words.decode() if words else ""

    def _call(self, function: Callable[[dist.Store], T]) -> T | None:
        if self._last is not None and self._last.is_alive():
            return None
        results: list[T] = []
        self._last = threading.Thread(target=self._try, args=(function, results), daemon=True)
        self._last.start()
        self._last.join(self._seconds)
        return results[0] if results else None

    def _try(self, function: Callable[[dist.Store], T], results: list[T]) -> None:
        try:
            results.append(function(self._connected()))
        except (RuntimeError, OSError):
            self._connection = None

    def _connected(self) -> dist.Store:
        if self._connection is None:
            # First a connection of our own, then torch's with time to spare: where that one fails, it writes warnings.
            socket.create_connection((self._host, self._port), timeout=self._seconds).close()
            own = dist.TCPStore(self._host, self._port, None, False, _PATIENCE, wait_for_workers=False, use_libuv=True)
            own.set_timeout(timedelta(seconds=self._seconds))
            self._connection = dist.PrefixStore(self._prefix, own)
        return self._connection
