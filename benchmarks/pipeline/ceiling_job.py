r"""The serial step on one rank alone, then on all ranks at once: what cores take from each other.

    mpirun -n 2 python -m benchmarks.pipeline.ceiling_job --layout channels_last

Each rank computes by itself, and nothing is sent. n times the seconds alone over those together is the speed-up that n
ranks could have without any bubble, message or imbalance.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING

from tiledseg.comm.session import leave, run_on_mesh

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh


def run(mesh: Mesh) -> None:
    import torch

    from benchmarks.pipeline.request import parser_of, request_of
    from benchmarks.pipeline.workload import make_input, make_network, serial_step

    request = request_of(parser_of(__doc__ or "").parse_args())
    workload = request.workload
    torch.set_num_threads(1)
    network = make_network(workload)
    inputs = [make_input(workload, m) for m in range(workload.micro_batches)]
    alone: list[float] = []
    together: list[float] = []

    def step(who: range) -> float:
        """The mean seconds of those who take it."""
        mesh.communicator.barrier()
        seconds = 0.0
        if mesh.rank in who:
            begun = time.perf_counter()
            network.zero_grad()
            serial_step(network, workload, inputs)
            seconds = time.perf_counter() - begun
        return sum(mesh.communicator.gather_objects(seconds)) / len(who)

    everyone = range(mesh.size)
    step(everyone)
    for _ in range(request.repeat):
        alone.append(statistics.mean(step(range(rank, rank + 1)) for rank in everyone))
        together.append(step(everyone))
    if mesh.is_root:
        print(json.dumps({"ranks": mesh.size, "alone": alone, "together": together}), flush=True)


if __name__ == "__main__":
    leave(run_on_mesh(run, "gloo"))
