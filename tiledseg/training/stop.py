"""The early end of training, between steps and with a checkpoint: by a signal, or as the job's time ends."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tiledseg.errors import ConfigError
from tiledseg.system.signals import STOPPED, is_met

EXIT_CODE = STOPPED

# When the job ends, as Unix seconds: what the batch scripts of `jobs/` say, and what newer Slurm says by itself.
_END_TIMES = ("TILEDSEG_END_TIME", "SLURM_JOB_END_TIME")
_SPARE = 30.0  # seconds for the last checkpoint's way to the disk and the end of all processes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the end of the job's time in Unix seconds; None if it is not set. Raises ConfigError for no number."""
    for name in _END_TIMES:
        if said := environ.get(name):
            if said.isdecimal():
                return float(said)
            raise ConfigError(f"{name} is '{said}'; give Unix seconds, as date +%s prints them, or unset it")
    return None


class StopFlag:
    """A flag that the signals of `system.signals` set, where they are deferred; no handler does more. So does the job's
    `end` (Unix seconds), once nearer than two of the longest steps so far, with checkpoint and validation.

    A run reads it at the beginning of each step. Ranks may see it at different steps: the reader adds up what all see.
    """

    def __init__(self, end: float | None = None) -> None:
        self.end, self._before, self._longest = end, time.time(), 0.0

    @property
    def is_set(self) -> bool:
        now = time.time()
        self._before, self._longest = now, max(self._longest, now - self._before)
        return is_met() or (self.end is not None and now + 2 * self._longest + _SPARE > self.end)
