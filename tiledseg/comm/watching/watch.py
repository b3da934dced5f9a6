"""A thread a rank that ends the job where it stands still, and says who holds it up.

Progress is a change of what a rank says it does (`doing`). Every few seconds each rank's thread puts its report on the
board, and reads rank 0's: two short messages, whatever the number of ranks. Rank 0, once it has itself made no progress
for most of the deadline, reads all of them, and speaks and ends the job where no rank that answers has made any. So a
long piece of work of one rank never ends a job while it ticks, however long the others wait. Where rank 0 itself is
silent, another rank speaks. Each begins to look by the deadline of its own pace, and ends the job by that of all
reports, which is no shorter.

Nothing here is collective, calls MPI or touches a GPU: the main thread may be stuck in any of them. Time counts only
while the thread runs, so that a job which is stopped as a whole and goes on later is not taken for a standstill.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from tiledseg.comm.failure import GRACE_SECONDS, flush, wait_until_read
from tiledseg.comm.launch import Launch
from tiledseg.comm.watching.board import Board
from tiledseg.comm.watching.doing import changes, current, pace
from tiledseg.comm.watching.verdict import SILENT, STALE, Deadlines, Report, Seen, not_answering, verdict

_LONGEST_PERIOD = 5.0
_LOST = 1.4  # periods after which a rank that is there has reported again
_TOLD_SECONDS = 0.5  # for who has read all reports


def report_period(deadline: float) -> float:
    return min(deadline / 20, _LONGEST_PERIOD)


class Observer:
    """Reports as they are read again and again, and for how long each has stayed the same."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def add(self, report: Report, seconds: float) -> Seen:
        """A report that was read `seconds` after the one before."""
        before = self._seen.get(report.rank)
        same = before is not None and before.report.beat == report.beat
        self._seen[report.rank] = Seen(report, before.unchanged + seconds if before is not None and same else 0.0)
        return self._seen[report.rank]

    def miss(self, rank: int, seconds: float) -> Seen:
        """Nothing could be read for `seconds`."""
        before = self._seen.get(rank) or Seen(Report(rank, "an unknown host", 0, 0.0, False, "unknown work"), 0.0)
        self._seen[rank] = Seen(before.report, before.unchanged + seconds)
        return self._seen[rank]

    def clear(self) -> None:
        self._seen.clear()


def open_watch(store: dist.Store, launch: Launch, environ: Mapping[str, str], deadlines: Deadlines) -> Watch:
    """This rank's part of the watch, with its first report at the store; its steps begin anew."""
    pace.forget()
    board, own = (Board(store, environ, max(0.5, report_period(deadlines.least))) for _ in range(2))
    return Watch(board, launch, socket.gethostname(), deadlines, own=own)


class Watch:
    """This rank's part of the watch over a job; `stop` it once all ranks have done their last communication."""

    def __init__(
        self,
        board: Board,
        launch: Launch,
        host: str,
        deadlines: Deadlines,
        leave: Callable[[int], object] = os._exit,
        own: Board | None = None,
    ) -> None:
        self._board, self._launch, self._host = board, launch, host
        self._own = own  # for the program's own thread
        self._deadlines, self._period = deadlines, report_period(deadlines.least)
        self._leave = leave
        self._beat = 0
        self._age = 0.0
        self._changes = -1
        self._root, self._all = Observer(), Observer()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._board.put(self._report())

    def start(self) -> None:
        """Every rank has made its watch: all have put their first report."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; it never speaks again. Rank 0, with which the store ends, waits until all have come here."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * GRACE_SECONDS)
        self._board.leave(self._launch.size if self._launch.is_root else 0)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            self._look(min(now - last, 2 * self._period))
            last = now

    def _look(self, seconds: float) -> None:
        """One report and one look at the others, `seconds` of this thread's own time after the last."""
        changed = changes()
        self._age = 0.0 if changed != self._changes else self._age + seconds
        self._changes = changed
        self._beat += 1
        self._board.put(self._report())
        line = self._look_at_all(seconds) if self._launch.is_root else self._look_at_root(seconds)
        if line is not None and not self._stopped.is_set():
            self._speak(line)

    def _look_at_all(self, seconds: float) -> str | None:
        """Rank 0's part: the verdict."""
        if self._age < (STALE - SILENT) * self._own_deadline() - 2 * self._period:
            self._all.clear()
            return None
        reports = self._board.read(range(self._launch.size))
        if reports is None:
            return None
        seen = [self._all.add(report, seconds) for report in reports]
        deadline = self._deadlines.of(reports)
        return verdict(seen, deadline) if self._age >= STALE * deadline else None

    def _look_at_root(self, seconds: float) -> str | None:
        """The others' part: ends this rank where rank 0 has spoken; the verdict where rank 0 is silent."""
        reports = self._board.read([0])
        root = self._root.add(reports[0], seconds) if reports else self._root.miss(0, seconds)
        if root.report.ended:
            self._end()
        if not self._stands_still(root, self._own_deadline()):
            return None
        others = self._board.read(range(1, self._launch.size)) or [self._report()]
        deadline = self._deadlines.of([root.report, *others])
        if not self._stands_still(root, deadline):
            return None
        line = verdict([root, *(Seen(report, 0.0) for report in others)], deadline)
        if line is not None and not self._board.is_first_speaker():
            self._end()
        if line is not None and not reports and self._launch.rank > 1:  # no store to agree at: rank 1 ends the others
            time.sleep(GRACE_SECONDS + min(self._launch.rank - 2, GRACE_SECONDS))
        return line

    def _stands_still(self, root: Seen, deadline: float) -> bool:
        return self._age >= STALE * deadline and root.unchanged >= SILENT * deadline

    def _own_deadline(self) -> float:
        """By this rank's pace: that of all is no shorter, but where a step ends while it is looked at."""
        return self._deadlines.of([self._report()])

    def _speak(self, line: str) -> None:
        flush()
        sys.stderr.write(f"error: {line}\n")
        wait_until_read()
        if self._launch.is_root:
            self._board.put(self._report(ended=True))
            time.sleep(2 * self._period)  # until the others have read it, who then leave unheard
        self._leave(1)

    def _end(self) -> None:
        """Another rank has spoken, or is about to."""
        time.sleep(GRACE_SECONDS)
        self._leave(1)

    def lost(self, least: float) -> str:
        """The ranks that report no more, in words; empty where all do, or where nobody can tell. Takes a little more
        than the time from report to report, and at least `least` seconds. Not collective: for ranks whose communication
        has failed. The first that asks reads all reports; the others read what it found.
        """
        period = max(_LOST * self._period, least)
        if self._own is None:
            time.sleep(period)
            return ""
        first = self._own.is_first_to_ask()
        before = self._own.read(range(self._launch.size)) if first else None
        time.sleep(period)
        if first is None:  # rank 0 keeps the store, or torchrun beside rank 0
            return not_answering([self._root.miss(0, 0.0).report])
        if not first:
            time.sleep(_TOLD_SECONDS)
            return self._own.told()
        now = self._own.read(range(self._launch.size))
        beats = {report.rank: report.beat for report in before or ()}
        words = not_answering([report for report in now or () if beats.get(report.rank) == report.beat])
        self._own.tell(words)
        return words

    def _report(self, ended: bool = False) -> Report:
        words, waits = current()
        return Report(self._launch.rank, self._host, self._beat, self._age, waits, words, ended, pace.known())
