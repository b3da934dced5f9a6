"""`python -m tiledseg.train` with the same flags, which ends right after this rank's first optimizer step.

Each rank writes one line of JSON to `$FIRST_STEP_OUTPUT.RANK`: the processor time of its process up to there (user and
system, all threads), and until the ranks had met; the time since it started; and the modules that it has loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg import train
from tiledseg.comm.session import leave

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

_run_on_mesh = train.run_on_mesh


def _measured(body: Callable[[Mesh], int | None], *settings: Any) -> int:
    """Run a command's body up to its first step, which ends it. torch must not be imported before this."""

    def until_first_step(mesh: Mesh) -> int | None:
        met = time.process_time()
        from tiledseg.training.step import Stepper

        whole_step = Stepper.run

        def first_step(*arguments: Any) -> None:
            whole_step(*arguments)
            _report(mesh.rank, met)
            mesh.communicator.barrier()
            leave(0)

        Stepper.run = first_step  # type: ignore[assignment, method-assign]
        return body(mesh)

    return _run_on_mesh(until_first_step, *settings)


def _report(rank: int, met: float) -> None:
    begun = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = {"met": met, "cpu": time.process_time(), "seconds": up - begun, "modules": sorted(sys.modules)}
    Path(f"{os.environ['FIRST_STEP_OUTPUT']}.{rank}").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    train.run_on_mesh = _measured  # type: ignore[assignment]
    leave(train.main())
