"""Times training steps in several halo modes, taken in turn; one line of JSON on rank 0. `scaling.py` starts it.

    mpirun -n 4 python -m benchmarks.spatial.step_job JOB

JOB is a StepJob as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from benchmarks.spatial.step_case import StepJob
from tiledseg.comm.session import leave, run_on_mesh

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh


def main() -> int:
    job = StepJob.from_json(sys.argv[1])

    def body(mesh: Mesh) -> None:
        from benchmarks.spatial.case_run import run_cases  # torch comes after MPI, which the session has started

        found = run_cases(job, mesh)
        if mesh.is_root:
            print(json.dumps(found), flush=True)

    return run_on_mesh(body, job.transport)


if __name__ == "__main__":
    leave(main())
