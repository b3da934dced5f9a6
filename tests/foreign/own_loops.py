"""Small training loops of a program's own on two ranks, none of which closes what it opened; how each rank ended.

    python -m tests.foreign.own_loops 200

The ranks are forked off a process that has loaded torch, so that a run takes a fraction of a second. They end as
programs do, through the interpreter's own shutdown.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import tiledseg
from tests.comm.launching import free_port
from tiledseg.foreign.parallelize import parallelize
from tiledseg.models.network import GraphNetwork

RANKS, SECONDS = 2, 120


def main(runs: int) -> bool:
    """Print the codes of runs of which a rank does not end with 0, then how many there are; True where there is none.
    On a rank it returns after its loop, whose module lives until the interpreter goes."""
    global shared
    network = tiledseg.trace(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), 3)
    gc.freeze()  # what torch has loaded is not looked at again by each process that ends
    failed = 0
    for _ in range(runs):
        port, started = free_port(), []
        for rank in range(RANKS):
            process = os.fork()
            if not process:
                signal.alarm(SECONDS)
                join(rank, port)
                atexit.register(check_closed)
                shared = trained(network)
                return True
            started.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
        if any(codes):
            failed += 1
            print(f"codes {codes}", flush=True)
    print(f"{runs} runs, {failed} failed")
    return not failed


def join(rank: int, port: str) -> None:
    """Give this process the environment of a task that srun has started."""
    step = {"PROCID": rank, "STEP_NUM_TASKS": RANKS, "LOCALID": rank, "NODEID": 0, "STEP_TASKS_PER_NODE": RANKS}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in step.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def check_closed() -> None:
    """End this process with 3 where the group that was opened for it is still there; other handlers have run before."""
    if dist.is_initialized():
        os._exit(3)


def trained(network: GraphNetwork) -> nn.Module:
    """Two steps on an image of 16 x 16 pixels."""
    module = parallelize(network, mesh=(RANKS, 1), verify=False)
    block = module.block(16, 16)
    for _ in range(2):
        module(torch.ones(1, 3, *block.shape)).square().mean().backward()
        module.reduce_gradients()
    return module


if __name__ == "__main__":
    sys.exit(not main(int(sys.argv[1])))
