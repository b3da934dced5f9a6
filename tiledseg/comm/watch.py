"""A thread on each rank that ends a job that stands still, and names the rank that holds it up.

Progress is a change of the record of `doing`. Every few seconds each rank's thread puts a heartbeat into the job's
store and reads that of rank 0: two short messages, for any number of ranks. Once rank 0 has made no progress for most
of the deadline, it reads all reports, and ends the job if no rank that answers has made any. A long piece of work of
one rank never ends a job while it ticks. If rank 0 is silent, another rank ends the job.

Nothing here is collective, calls MPI or uses a GPU: the main thread may be stuck in any of them. Time counts only
while the thread runs: a job suspended as a whole and resumed later is not taken for a standstill.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tiledseg.comm.doing import changes, current, name_ranks
from tiledseg.comm.failure import GRACE_SECONDS, flush, wait_until_read
from tiledseg.comm.launch import Launch

T = TypeVar("T")

_LONGEST_PERIOD = 5.0
_LOST = 1.4  # periods after which a living rank has reported again
_ASKERS = 8  # ranks that read all reports: the lowest print first, and the launcher then ends the others
_PATIENCE = timedelta(minutes=5)  # to connect: on a busy machine a thread may stand still for seconds
_LAST_SECONDS = 30.0  # for the slowest rank's last look

# Shares of the deadline. Ranks notice a standstill at slightly different times. A rank whose report has not changed for
# the share SILENT is stopped or gone, or holds the interpreter in a call that never returns.
STALE = 0.9
_ALL_STALE = 0.7
SILENT = 0.4
_GROUPS = 6
_WORDS = 160
_GONE = "not answering, last in"


class Report(NamedTuple):
    """A rank's heartbeat. `beat` counts its reports; `age`: seconds without progress."""

    rank: int
    host: str
    beat: int
    age: float
    waits: bool
    words: str
    ended: bool = False


class SeenReport(NamedTuple):
    """A report, and the seconds for which reads have returned the same one."""

    report: Report
    unchanged: float


def verdict(seen: Sequence[SeenReport], deadline: float) -> str | None:
    """Return a line that names the ranks that hold up the job, with the work of every rank; None while the job lives.

    A rank that answers and has made progress within the deadline keeps the job alive.
    """
    silent = [one.report for one in seen if one.unchanged >= SILENT * deadline]
    answering = [one.report for one in seen if one.unchanged < SILENT * deadline]
    if any(report.age < _ALL_STALE * deadline for report in answering):
        return None
    busy = sorted((report for report in answering if not report.waits), key=lambda report: -report.age)
    parts = [*_groups(silent, _GONE), *_groups(busy, "stuck in")] or ["every rank waits for another"]
    parts += _groups([report for report in answering if report.waits], "waiting in")
    more = [f"{len(parts) - _GROUPS} more groups"] if len(parts) > _GROUPS else []
    return (
        f"no rank has made progress for {deadline:.3g} s: {'; '.join([*parts[:_GROUPS], *more])}. Look at what the "
        "first ones do and at their machines, or raise parallel.deadline where one piece of work takes longer"
    )


def _groups(reports: Sequence[Report], how: str) -> list[str]:
    """Return a phrase for each group of ranks with the same words, in the order of their first ranks."""
    groups: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        groups[report.words].append(report)
    lines = []
    for words, each in groups.items():
        host = f" on {each[0].host}" if len(each) == 1 else ""
        who = name_ranks(sorted(report.rank for report in each))
        lines.append(f"{who}{host} {how}: {words[:_WORDS]}{'...' * (len(words) > _WORDS)}")
    return lines


class Board:
    """Reports by rank in the job's store, over a connection of its own.

    Every call returns within `seconds`, even if rank 0, which keeps the store, is stopped. The store's own calls may
    then wait forever, so each runs in a thread; until that thread returns, the store counts as not answering. A failed
    call drops the connection, and the next one reconnects. Not thread-safe.
    """

    def __init__(self, store: dist.Store, environ: Mapping[str, str], seconds: float) -> None:
        base = store.underlying_store if isinstance(store, dist.PrefixStore) else store
        assert isinstance(base, dist.TCPStore), "the job's ranks meet at a TCP store"
        self._kept = store  # rank 0's store closes with its last reference
        self._host, self._port = base.host, base.port
        self._prefix = f"watch {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun's store outlives a restart
        self._seconds = seconds
        self._connection: dist.Store | None = None
        self._last: threading.Thread | None = None

    def put(self, report: Report) -> None:
        """Replace the rank's report if the store answers."""
        self.call(lambda store: store.set(str(report.rank), json.dumps(report)))

    def read(self, ranks: Sequence[int]) -> list[Report] | None:
        """Return the last reports of `ranks`, all of which have put one; None if the store does not answer."""
        texts = self.call(lambda store: store.multi_get([str(rank) for rank in ranks]))
        return [Report(*json.loads(text)) for text in texts] if texts is not None else None

    def count(self, name: str, more: int = 1) -> int | None:
        """Add to the counter `name` and return its value; None if the store does not answer."""
        return self.call(lambda store: store.add(name, more))

    def call(self, function: Callable[[dist.Store], T]) -> T | None:
        """Return `function(store)`; None if the store does not answer."""
        if self._last is not None and self._last.is_alive():
            return None
        results: list[T] = []
        self._last = threading.Thread(target=self._try, args=(function, results), daemon=True)
        self._last.start()
        self._last.join(self._seconds)
        return results[0] if results else None

    def _try(self, function: Callable[[dist.Store], T], results: list[T]) -> None:
        try:
            if self._connection is None:
                # First test with a plain socket, then connect with time to spare: a failing TCPStore prints warnings.
                socket.create_connection((self._host, self._port), timeout=self._seconds).close()
                own = dist.TCPStore(self._host, self._port, None, False, _PATIENCE, False, use_libuv=True)
                own.set_timeout(timedelta(seconds=self._seconds))
                self._connection = dist.PrefixStore(self._prefix, own)
            results.append(function(self._connection))
        except (RuntimeError, OSError):
            self._connection = None


class Watch:
    """This rank's part of the watch over a job, with its first report at the store; `stop` it after the last
    communication of all ranks."""

    def __init__(self, store: dist.Store, launch: Launch, environ: Mapping[str, str], deadline: float) -> None:
        self._launch, self._host = launch, socket.gethostname()
        self._deadline, self._period = deadline, min(deadline / 20, _LONGEST_PERIOD)
        # One for the watch, one for the program's own thread.
        self._board, self._own = (Board(store, environ, max(0.5, self._period)) for _ in range(2))
        self._beat, self._changes = 0, -1
        self._age = 0.0
        self._seen: dict[int, SeenReport] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._board.put(self._report())

    def start(self) -> None:
        """Start the thread, once every rank has put its first report."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Rank 0 waits until all ranks have called it, half a minute at most.

        The store closes with rank 0, and torch prints a warning on each rank that still uses it (seen with 64 ranks).
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * GRACE_SECONDS)
        left, end = self._board.count("left"), time.monotonic() + _LAST_SECONDS
        while self._launch.is_root and left is not None and left < self._launch.size and time.monotonic() < end:
            time.sleep(0.02)
            left = self._board.count("left", 0)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            self._look(min(now - last, 2 * self._period))
            last = now

    def _look(self, seconds: float) -> None:
        """Report once and read the others' reports, `seconds` of this thread's time after the last look."""
        changed = changes()
        self._age = 0.0 if changed != self._changes else self._age + seconds
        self._changes = changed
        self._beat += 1
        self._board.put(self._report())
        line = None
        if not self._launch.is_root:
            line = self._look_at_root(seconds)
        elif self._age < (STALE - SILENT) * self._deadline - 2 * self._period:
            self._seen.clear()
        else:
            reports = self._board.read(range(self._launch.size))
            seen = [self._observe(report.rank, report, seconds) for report in reports or ()]
            line = verdict(seen, self._deadline) if seen and self._age >= STALE * self._deadline else None
        if line is None or self._stopped.is_set():
            return
        flush()
        sys.stderr.write(f"error: {line}\n")
        wait_until_read()
        if self._launch.is_root:
            self._board.put(self._report(ended=True))
            time.sleep(2 * self._period)  # until the others have read it, and leave without a line
        os._exit(1)

    def _look_at_root(self, seconds: float) -> str | None:
        """End this process if rank 0 has ended the job; return the verdict if rank 0 is silent."""
        reports = self._board.read([0])
        root = self._observe(0, reports[0] if reports else None, seconds)
        if root.report.ended:
            self._end()
        if self._age < STALE * self._deadline or root.unchanged < SILENT * self._deadline:
            return None
        others = self._board.read(range(1, self._launch.size)) or [self._report()]
        line = verdict([root, *(SeenReport(report, 0.0) for report in others)], self._deadline)
        if line is not None and self._board.count("speakers") not in (None, 1):
            self._end()
        if line is not None and not reports and self._launch.rank > 1:  # no store to agree at: rank 1 ends the others
            time.sleep(GRACE_SECONDS + min(self._launch.rank - 2, GRACE_SECONDS))
        return line

    def _observe(self, rank: int, report: Report | None, seconds: float) -> SeenReport:
        """Record a rank's report (None: not read), `seconds` after the last; return it with the time it stayed the
        same."""
        unknown = SeenReport(Report(rank, "an unknown host", 0, 0.0, False, "unknown work"), 0.0)
        before = self._seen.get(rank, unknown)
        same = report is None or (rank in self._seen and before.report.beat == report.beat)
        self._seen[rank] = SeenReport(report or before.report, before.unchanged + seconds if same else 0.0)
        return self._seen[rank]

    def _end(self) -> None:
        """End this process without a line: another rank prints it."""
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def lost(self, least: float) -> str:
        """Return the ranks that no longer report, in words; empty if all do or it is unknown.

        For ranks whose communication has failed; not collective. Takes a little more than a period of reports, and at
        least `least` seconds. Only the first ranks read all reports.
        """
        everyone = range(self._launch.size if self._launch.rank < _ASKERS else 1)
        before = self._own.read(everyone)
        time.sleep(max(_LOST * self._period, least))
        now = self._own.read(everyone)
        if before is None or now is None:  # rank 0 keeps the store, or torchrun beside rank 0
            gone = [self._observe(0, None, 0.0).report]
        else:
            gone = [new for old, new in zip(before, now, strict=True) if old.beat == new.beat]
        return "; ".join(_groups(gone, _GONE)[:_GROUPS])

    def _report(self, ended: bool = False) -> Report:
        words, waits = current()
        return Report(self._launch.rank, self._host, self._beat, self._age, waits, words, ended)
