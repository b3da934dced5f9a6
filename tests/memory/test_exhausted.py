"""Out of memory: one line that says what was asked, what there was, and a budget under which the step fits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.memory.stores import offload
from tiledseg.errors import MemoryLimitError
from tiledseg.memory.allocations import exhausted, is_exhausted

PROGRAM = """
import resource, sys, threading, time
import torch
import tiledseg
from tiledseg.errors import MemoryLimitError

def step(size):
    x = torch.ones(size, requires_grad=True)
    y = x
    for k in range(16):
        y = (y * 1.01).sin()
    y.sum().backward()

step(1000)
mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (mapped + (240 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
budget, tries = 1 << 40, 0
while True:
    tries += 1
    try:
        with tiledseg.large_model_support(budget=budget, store=sys.argv[1]):
            step(4 << 20)
        break
    except MemoryLimitError as error:
        line = str(error)
    print(line, flush=True)
    while threading.active_count() > 1:  # of the block that has failed, until its last graph is gone
        time.sleep(0.02)
    budget = int(line.split("a budget of ")[2].split()[0])
print("fits", tries, budget)
"""


def test_following_the_advice_makes_a_step_fit(tmp_path: Path) -> None:
    """Sines of 270 MB, and gradients, under a limit of 240 MiB.

    Each thread's own heap would count as 64 MiB, and freed blocks as well.
    """
    own = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=own)
    lines = ended.stdout.splitlines()
    assert lines[-1].startswith("fits "), ended.stdout + ended.stderr
    assert 2 <= int(lines[-1].split()[1]) <= 8
    words = r"memory has run out; autograd alone held \d+ of a budget of \d+ bytes: .*allocate 16777216 bytes"
    assert all(re.match(words, line) for line in lines[:-1])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. x"),
        torch.OutOfMemoryError("Tried to allocate 1.50 GiB. GPU 0"),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"),
        MemoryError("Cannot allocate memory"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_each_kind_is_known(error: BaseException) -> None:
    assert is_exhausted(error)
    said = str(exhausted(error, 0, 100))
    assert said.startswith("memory has run out; ")
    assert "nothing more can leave; use smaller tiles" in said


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(28, "full"), MemoryLimitError("store"), None])
def test_other_errors_pass_as_they_are(error: BaseException | None, tmp_path: Path) -> None:
    assert not is_exhausted(error)
    if error is not None:
        with pytest.raises(type(error)) as raised, offload(tmp_path, 0):
            raise error
        assert raised.value is error
