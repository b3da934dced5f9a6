"""The cases of as many ranks as this job has, over one transport. `shared_gpu.py` starts it under mpirun.

mpirun -n 4 python shared_gpu_job.py --out FOLDER --work FOLDER --transport gloo
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.lines import one_line
from benchmarks.gpu.part import Part, begin_part
from tiledseg.comm.launch import detect
from tiledseg.comm.session import leave, open_mesh

if TYPE_CHECKING:
    from benchmarks.gpu.shared_cases import Case
    from tiledseg.comm.mesh import Mesh


def main() -> int:
    launch = detect(os.environ)
    part = begin_part("shared_gpu", speaks=launch.is_root)
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", required=True)
    options, _ = parser.parse_known_args()
    mesh = open_mesh(launch, os.environ, options.transport)
    from benchmarks.gpu.shared_cases import CASES  # torch comes after MPI, which the mesh has started

    for case in [case for case in CASES if case.ranks == launch.size]:
        name = f"{case.name}, {mesh.transport}"
        part.measure(name, "s", partial(_run, part, case, mesh))
    mesh.communicator.close()
    return int(part.failed)


def _run(part: Part, case: Case, mesh: Mesh) -> dict[str, Any] | None:
    """One case. Collective; where a rank fails, all raise. Without that a later case would wait for it forever."""
    from benchmarks.gpu.shared_cases import compared, config_of, train

    folder = part.work / "shared_gpu"
    output = f"{mesh.transport}-{mesh.size}-{case.name.replace(' ', '-').replace(',', '')}"
    fault, found = None, None
    try:
        steps = train(config_of(case.run, folder, output, case.parallel, part.small), mesh)
        found = compared(case, steps, folder, output, mesh) if mesh.is_root else None
    except Exception as error:
        fault = one_line(error)
    faults = mesh.communicator.gather_objects(fault)
    if any(faults):
        raise RuntimeError("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(faults) if words))
    return found


if __name__ == "__main__":
    leave(main())
