"""Sums of tensors on the device over all ranks, in the middle of which the last rank kills itself. Started by mpirun.

mpirun -n 2 python killed_rank_job.py TRANSPORT
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from tiledseg.comm.session import leave, run_on_mesh

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

SUMS, KILLED_AT = 50, 5


def body(mesh: Mesh) -> None:
    import torch

    x = torch.ones(1 << 16, device=mesh.device)
    for number in range(SUMS):
        if number == KILLED_AT and mesh.rank == mesh.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.communicator.all_reduce_sum(x).wait()
        print(f"rank {mesh.rank}: sum {number} is {float(x[0])}", flush=True)


if __name__ == "__main__":
    leave(run_on_mesh(body, sys.argv[1]))
