"""How fast messages and all-reduces are among ranks of this job, and what ranks that share cores cost each other."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import Communicator
from tiledseg.memory.disk.rates import StoreRates
from tiledseg.memory.host.lanes import GpuLanes
from tiledseg.memory.host.rates import host_rates
from tiledseg.pipeline.link_time import measure_link
from tiledseg.planning.cost_model.profile import Link, Sharing
from tiledseg.training.calibration.movement import least

_SMALL, _LARGE = 1, 1 << 20  # values of 8 bytes


def measure_link_of(mesh: Mesh, communicator: Communicator) -> Link:
    """Messages between ranks 0 and 1, and all-reduces of `communicator`, of some or all ranks. Collective.

    It cannot deadlock: ranks 0 and 1 speak in turn, then all take part in the same sums.
    """
    messages = mesh.communicator.point_to_point()
    pair = measure_link(messages, 1 - mesh.rank, mesh.rank == 0, mesh.device) if mesh.rank < 2 else None
    messages.close()
    pair = mesh.communicator.gather_objects(pair)[0]
    assert pair is not None, "rank 0 has measured it"
    small, large = (_all_reduce(mesh, communicator, size) for size in (_SMALL, _LARGE))
    ranks = max(mesh.communicator.gather_objects(communicator.size))
    speed = 2 * (ranks - 1) / ranks * 8 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    rounds = 2 * math.ceil(math.log2(ranks))
    return Link(pair.latency, 1 / max(pair.per_byte, 1e-15), small / rounds, speed)


def measure_host_store(mesh: Mesh, size: int) -> StoreRates | None:
    """The way between a device and the memory of its host: of the slowest rank, while all send `size` bytes, which may
    share what lies between; None on a CPU. Collective: it cannot deadlock, since each measures alone, then all gather.
    """
    own = None if mesh.device.type == "cpu" else host_rates(GpuLanes(mesh.device), size)
    known = [rates for rates in mesh.communicator.gather_objects(own) if rates is not None]
    return StoreRates(*map(min, zip(*known, strict=True))) if known else None


def _all_reduce(mesh: Mesh, communicator: Communicator, size: int) -> float:
    values = torch.zeros(size, dtype=torch.float64, device=mesh.device)
    own = least(mesh.device, lambda: communicator.all_reduce_sum(values).wait())
    return max(mesh.communicator.gather_objects(own))


def measure_sharing(device: torch.device) -> tuple[int | None, Sharing]:
    """Cores that ranks on a CPU share, and how many times longer a layer takes with all of them at work; None of a
    device of its own."""
    if device.type != "cpu":
        return None, Sharing()
    cores = len(os.sched_getaffinity(0))
    teams = max(1, cores // torch.get_num_threads())
    if teams == 1:
        return cores, Sharing()
    return cores, Sharing(_slower(_product, teams), _slower(_copying, teams))


def _product() -> Callable[[], object]:
    x_BCHW = torch.rand(1, 32, 128, 128).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(32, 32, 3, 3)
    return lambda: [torch.nn.functional.conv2d(x_BCHW, weight, padding=1) for _ in range(20)]


def _copying() -> Callable[[], object]:
    values = torch.rand(1 << 20)  # as a tensor of a tile: larger than a cache of one core
    return lambda: [torch.nn.functional.leaky_relu(values, inplace=True) for _ in range(60)]


def _slower(make: Callable[[], Callable[[], object]], teams: int) -> float:
    """With so many at once, over one alone; threads, whose work goes on outside the interpreter."""
    cpu = torch.device("cpu")
    ways = [make() for _ in range(teams)]
    alone = least(cpu, ways[0])
    found, together = [0.0] * teams, threading.Barrier(teams)

    def one(index: int) -> None:
        together.wait()
        found[index] = least(cpu, ways[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(teams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(1.0, max(found) / alone)
