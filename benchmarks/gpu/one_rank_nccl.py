"""The real start, sums, messages and end of NCCL with the one rank that one GPU allows; and its refusal of two.

Without a GPU the same calls go through Gloo alone. `open_mesh` gives one rank no transport at all, so the groups are
made here as it makes them for several.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.production import finish
from benchmarks.launching import python_ranks, run_process
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.comm.rendezvous import gloo_interface
from tiledseg.comm.transport_torch import TorchCommunicator, all_ranks, of_ranks
from tiledseg.errors import ConfigError

DTYPES = (torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16)


def main() -> int:
    part = begin_part(__file__)
    count = 1000 if part.small else 25_000_000
    opened: list[TorchCommunicator] = []
    part.measure("start", "s", lambda: timed(lambda: opened.append(open_alone(part.device))))
    for communicator in opened:
        for dtype in DTYPES:
            part.measure(f"sum {dtype}", "us", partial(sum_of, communicator, dtype, count, part.device))
        part.measure("messages open", "s", partial(timed, partial(open_messages, communicator)))
        part.measure("part of the job", "us", lambda: sum_in_part(count, part.device))
        part.measure("end", "s", partial(timed, communicator.close))
    part.measure("two ranks on one GPU are refused", "exit code", lambda: refusal(part), needs=20)
    return int(part.failed)


def open_messages(communicator: TorchCommunicator) -> None:
    PointToPoint(communicator)


def open_alone(device: torch.device) -> TorchCommunicator:
    """Gloo's group of one rank, and NCCL's beside it where there is a GPU: connected at once (an eager start)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", gloo_interface(SERIAL) or "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if device.type != "cuda":
        return all_ranks()
    torch.cuda.set_device(device)
    return all_ranks(gpu_of=device)


def sum_of(communicator: TorchCommunicator, dtype: torch.dtype, count: int, device: torch.device) -> dict[str, float]:
    """Of one rank: the tensor itself, bit for bit. Microseconds until the call returns, and until the sum is there."""
    x = (torch.rand(count, device=device, dtype=torch.float64) * 1000 - 500).to(dtype)
    expected = x.clone()
    communicator.all_reduce_sum(x).wait()
    finish(device)
    begun = time.perf_counter()
    work = communicator.all_reduce_sum(x)
    posted = time.perf_counter() - begun
    work.wait()
    finish(device)
    done = time.perf_counter() - begun
    if not torch.equal(x, expected):
        raise ArithmeticError(f"the sum of one rank's {dtype} is not what it gave")
    return {"posted": 1e6 * posted, "done": 1e6 * done, "values": count}


def sum_in_part(count: int, device: torch.device) -> dict[str, float]:
    """The groups of a part of the job, as `split` makes them for several ranks."""
    part = of_ranks([0], with_nccl=device.type == "cuda")
    assert part is not None, "this rank is among them"
    part.is_part = True
    found = sum_of(part, torch.float64, count, device)
    part.close()
    return found


def refusal(part: Part) -> int:
    """Exit code 2 and one line that says why. With a GPU of its own for each rank this would run, and fails here."""
    command = [*python_ranks(2), "-m", "tiledseg.doctor", "--transport", "nccl"]
    done = run_process(command, part.left)
    lines = [line for line in done.err.splitlines() if line.startswith("error:")]
    if done.code != ConfigError.exit_code or len(lines) != 1 or "transport nccl needs a GPU" not in lines[0]:
        raise AssertionError(f"ended with code {done.code} and said {lines or done.err[-300:]}")
    return done.code


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
