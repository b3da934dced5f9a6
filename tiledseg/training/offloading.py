"""A run in which what autograd keeps leaves memory for a store: opened for the run, and told of at its end.

A CPU's tensors go to a file on a local disk, a GPU's to the memory of its host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError
from tiledseg.execution.memory import host_memory
from tiledseg.memory.mover import HOST
from tiledseg.memory.movers import mover_to
from tiledseg.models.rerun.homes import Hooks
from tiledseg.planning.run.memory import OffloadPlan

if TYPE_CHECKING:
    from tiledseg.memory.offload import Offload

MIB = 2**20


class Moved(NamedTuple):
    """What has left for `store` and come back, bytes of all ranks together; the longest that a rank has waited
    for it; the most bytes that autograd alone held in a rank's memory; the share of tensors that were on their way when
    they were wanted, None where none was; and passes forward and back, of which so many went on as an earlier one."""

    store: str
    bytes_out: int
    bytes_in: int
    waited_seconds: float
    peak_bytes: int
    ahead: float | None
    steps: int
    known_steps: int

    @property
    def in_words(self) -> str:
        """For the user."""
        return (
            f"offload: {self.bytes_out / MIB:.1f} MiB went to {store_in_words(self.store)}, "
            f"{self.bytes_in / MIB:.1f} MiB came back, {self.waited_seconds:.1f} s were waited"
        )


def store_in_words(store: str) -> str:
    """Where what has left lies."""
    return "the host's memory" if store == HOST else f"a file in {store}"


def offload_to(store: str, plan: OffloadPlan | None, in_stages: bool, mesh: Mesh) -> Offload | None:
    """In its context what autograd keeps leaves for `store`, as planned; None where nothing does.
    Its end gives all back, however it comes about. `in_stages`: micro-batches go forward and back in turns, so that
    `end_step` tells the steps; else each forward pass after a backward pass begins one."""
    if plan is None:
        return None
    from tiledseg.memory.disk.shelf import free_bytes
    from tiledseg.memory.offload import LEAST, Offload

    limit = host_memory() // mesh.launch.local_size if store == HOST else free_bytes(store)  # ranks share their host's
    least = 1 if plan.chosen else LEAST
    return Offload(mover_to(store, mesh.device, limit), plan.staying, least, in_stages, all_kept=not plan.chosen)


def hooks_of(moving: Offload | None) -> Hooks | None:
    """What holds the tensors that a memory policy has leave."""
    return None if moving is None else Hooks(moving.pack, lambda back: back(), moving.passed)


def check_store(offload: str, store: str, device: torch.device) -> None:
    """Raise ConfigError where something is to leave a memory that has no way to its store."""
    if offload == "none":
        return
    if device.type == "cpu" and store == HOST:
        raise ConfigError(
            f"memory.offload is {offload}, but memory.store is host, the memory that is to be spared; give a folder on "
            "a local disk"
        )
    if device.type != "cpu" and store != HOST:
        raise ConfigError(
            f"memory.offload is {offload} and memory.store {store}, but this machine's tensors are on {device}, and "
            "leave for the host's memory; use memory.store host, or leave it out"
        )


def moved_by_ranks(found: Offload | None, store: str, mesh: Mesh) -> Moved | None:
    """Collective: on all ranks the same. None where nothing was to leave."""
    if found is None:
        return None
    each = mesh.communicator.gather_objects(found.counted())
    out, back = sum(figures.bytes_out for figures in each), sum(figures.bytes_in for figures in each)
    waited = max(figures.waited_seconds for figures in each)
    ahead, wanted = sum(f.expected for f in each), sum(f.expected + f.demanded for f in each)
    share = ahead / wanted if wanted else None
    steps, known = sum(figures.steps for figures in each), sum(figures.known_steps for figures in each)
    return Moved(store, out, back, waited, max(figures.peak_bytes for figures in each), share, steps, known)
