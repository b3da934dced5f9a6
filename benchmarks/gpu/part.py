"""One part of the battery: a program of its own, so that what breaks the GPU's context ends one part and no more.

A measurement that fails is written as failed and the next one runs; one for which no time is left is skipped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.lines import one_line, write_line


class SkippedError(Exception):
    """What a measurement needs is not there; the message says what."""


class Part:
    """Where a part's measurements go, and how long it may take.

    `small`: sizes that a CPU computes in seconds, which show that the code runs and nothing of speed. `speaks`: False
    on ranks whose results another rank writes. `work`: a folder for all that is not a result.
    """

    def __init__(self, name: str, folder: Path, work: Path, small: bool, seconds: float, speaks: bool = True) -> None:
        self.name = name
        self.folder = folder
        self.work = work
        self.small = small
        self.speaks = speaks
        self.failed = False
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the part should be done."""
        return self._end - time.monotonic()

    @property
    def device(self) -> Any:
        """The GPU, or the CPU where there is none."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def measure(self, name: str, unit: str | None, function: Callable[[], Any], needs: float = 0.0) -> Any:
        """Calls `function`, writes its value, and returns it; None where it failed or was skipped. `needs`: seconds."""
        begun = time.monotonic()
        if self.left < needs:
            self._write(name, "skipped", begun, reason=f"needs {needs:.0f} s, {max(0.0, self.left):.0f} s are left")
            return None
        try:
            value = function()
        except SkippedError as error:
            self._write(name, "skipped", begun, reason=str(error))
            return None
        except Exception as error:
            self.failed = True
            self._write(name, "failed", begun, reason=one_line(error))
            return None
        self._write(name, "ok", begun, value=value, unit=unit)
        return value

    def needs_gpu(self) -> None:
        """Raises SkippedError where there is none."""
        if self.device.type != "cuda":
            raise SkippedError("no GPU on this machine")

    def _write(self, name: str, state: str, begun: float, **found: Any) -> None:
        if self.speaks:
            write_line(self.folder, self.name, name, state, time.monotonic() - begun, **found)


def begin_part(program: str, speaks: bool = True) -> Part:
    """The part of the running program, by its command line. SIGTERM ends it as an exception does, with its jobs."""
    signal.signal(signal.SIGTERM, _leave)
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    options, _ = parser.parse_known_args()
    return Part(Path(program).stem, options.out, options.work, options.small, options.seconds, speaks)


def _leave(signal_number: int, frame: object) -> NoReturn:
    sys.exit(128 + signal_number)
