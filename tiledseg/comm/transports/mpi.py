"""mpi4py, imported only where a job needs it and before torch, whose libraries may otherwise clash with MPI's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tiledseg.comm.launch import SERIAL, Launch
from tiledseg.errors import ConfigError, first_line

if TYPE_CHECKING:
    from mpi4py import MPI

MPI_LAUNCHERS = ("openmpi", "jsrun", "pmi", "mpi")


def load_world(launch: Launch) -> MPI.Intracomm:
    """Return COMM_WORLD, with MPI initialised; its rank and size are those of `launch`. Raises ConfigError otherwise.

    Collective: all ranks call it at the start of a job.
    """
    try:
        MPI = _import_mpi()  # noqa: N806
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{launch.launcher} started {launch.size} ranks but mpi4py cannot be used ({first_line(error)}): "
            "pip install mpi4py, or start with torchrun"
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.size):
        library = MPI.Get_library_version().split(",")[0].strip()
        raise ConfigError(
            f"{launch.launcher} says rank {launch.rank} of {launch.size} but MPI ({library}) says rank {world.rank} of "
            f"{world.size}: use the launcher of the MPI that mpi4py was built with (srun needs --mpi=pmix)"
        )
    return world


def ask_mpi() -> Launch:
    """Return the place of this process as MPI itself tells it, for launchers that leave no variables; alone without
    mpi4py.

    Collective over whatever COMM_WORLD turns out to be.
    """
    try:
        MPI = _import_mpi()  # noqa: N806
    except (ImportError, RuntimeError):
        return SERIAL
    world = MPI.COMM_WORLD
    if world.size == 1:
        return SERIAL
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    launch = Launch(world.rank, world.size, node.rank, node.size, "mpi")
    node.Free()
    return launch


def check_threads(provided: int, serialized: int, library: str) -> None:
    """Raise ConfigError where MPI may be called from the main thread only. Pure; both levels are MPI's own numbers.

    Halo exchanges and gradient sums of a GPU are started from autograd's thread of that device, not from the main one.
    """
    if provided < serialized:
        raise ConfigError(
            f"MPI ({library}) provides thread level {provided}, but transport mpi needs {serialized} "
            "(MPI_THREAD_SERIALIZED), since autograd calls it from a thread of its own: use an MPI with threads, or "
            "transport gloo or nccl"
        )


def _import_mpi() -> Any:
    """Import MPI for calls from several threads at once, and return its module.

    The support that MPI provides is checked where it matters.
    """
    import mpi4py

    mpi4py.rc.threads = True
    mpi4py.rc.thread_level = "multiple"
    from mpi4py import MPI

    return MPI


def initialised() -> Any | None:
    """Return the MPI module where this process has started MPI and not yet ended it, else None. Imports nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module
