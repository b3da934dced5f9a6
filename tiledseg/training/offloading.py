"""A run in which what autograd keeps leaves memory for a file: opened for the run, and told of at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError
from tiledseg.models.rerun.homes import Hooks
from tiledseg.planning.run.memory.offloading import OffloadPlan

if TYPE_CHECKING:
    from tiledseg.memory.offload import Offload

MIB = 2**20


class Moved(NamedTuple):
    """What has left for files in `store` and come back, bytes of all ranks together; the longest that a rank has waited
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
            f"offload: {self.bytes_out / MIB:.1f} MiB went to {self.store}, {self.bytes_in / MIB:.1f} MiB came back, "
            f"{self.waited_seconds:.1f} s were waited"
        )


def offload_to(store: str, plan: OffloadPlan | None, in_stages: bool) -> Offload | None:
    """In its context what autograd keeps leaves for a file in the folder `store`, as planned; None where nothing does.
    Its end gives all back, however it comes about. `in_stages`: micro-batches go forward and back in turns, so that
    `end_step` tells the steps; else each forward pass after a backward pass begins one."""
    if plan is None:
        return None
    from tiledseg.memory.disk.file_mover import FileMover
    from tiledseg.memory.disk.file_store import FileStore
    from tiledseg.memory.disk.shelf import free_bytes
    from tiledseg.memory.offload import LEAST, Offload

    least = 1 if plan.chosen else LEAST
    all_kept = not plan.chosen
    return Offload(lambda: FileMover(FileStore(store, free_bytes(store))), plan.staying, least, in_stages, all_kept)


def hooks_of(moving: Offload | None) -> Hooks | None:
    """What holds the tensors that a memory policy has leave."""
    return None if moving is None else Hooks(moving.pack, lambda back: back(), moving.passed)


def check_device(offload: str, mesh: Mesh) -> None:
    """Raise ConfigError where something is to leave a memory that has no way to a file."""
    if offload != "none" and mesh.device.type != "cpu":
        raise ConfigError(
            f"memory.offload is {offload}, but this machine's tensors are on {mesh.device}, and go to no file "
            "yet; use memory.recompute, or memory.blocks"
        )


def moved_by_ranks(found: Offload | None, store: str, mesh: Mesh) -> Moved | None:
    """Collective: on all ranks the same. None where nothing was to leave."""
    if found is None:
        return None
    each = mesh.communicator.gather_objects(found.figures)
    out, back = sum(figures.bytes_out for figures in each), sum(figures.bytes_in for figures in each)
    waited = max(figures.waited_seconds for figures in each)
    ahead, wanted = sum(f.expected for f in each), sum(f.expected + f.demanded for f in each)
    share = ahead / wanted if wanted else None
    steps, known = sum(figures.steps for figures in each), sum(figures.known_steps for figures in each)
    return Moved(store, out, back, waited, max(figures.peak_bytes for figures in each), share, steps, known)
