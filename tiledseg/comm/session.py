"""The session of a job: its ranks meet, run a body, and end together, also if one of them fails.

A session imports torch, after mpi4py if the job needs it: in another order their libraries may clash. Commands import
their heavy modules inside the body: they keep that order, and refuse wrong flags fast.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from tiledseg.comm.failure import exit_code, is_agreed, report, report_before_mesh, report_from, wait_until_read
from tiledseg.comm.launch import Launch, detect, open_files_needed
from tiledseg.config.checks import TRANSPORTS, one_of
from tiledseg.errors import CommunicationError, ConfigError, InputError, first_line
from tiledseg.system.console import end, flush
from tiledseg.system.files import allow_open_files
from tiledseg.system.signals import ending, swallowed

if TYPE_CHECKING:
    from mpi4py import MPI

    from tiledseg.comm.collectives import Communicator
    from tiledseg.comm.mesh import Mesh
    from tiledseg.comm.watch import Watch

_HEAD_START_SECONDS = 1.0
DEADLINE = 600.0  # seconds
MPI_LAUNCHERS = ("openmpi", "jsrun", "pmi")


def run_on_mesh(body: Callable[[Mesh], int | None], transport: str = "auto", deadline: float | None = None) -> int:
    """Start the mesh, call `body` on every rank, and return this process's exit code. Collective.

    The job's code is the largest that a body returned (None is 0). Rank 0 returns it and leaves last; the others return
    0. A launcher that ends a job at the first code above 0 then has nobody to kill, and reports that code.

    If a body raises, the whole job ends within seconds, with code 2 for InputError, 130 for an interrupt, 1 otherwise.
    Rank 0 prints an error that all ranks agreed on. A rank prints any other error itself, and its process ends here.
    Raises ConfigError for a `transport` that is not available. If no rank makes progress for `deadline` seconds (None:
    ten minutes), the job ends with 1 and a line that names the stuck or dead rank (`watch`).
    """
    launch = detect(os.environ)
    mesh: Mesh | None = None
    try:  # one block: a signal between two would pass both, and leave MPI to wait for ranks that are gone
        mesh = open_mesh(launch, os.environ, transport, deadline or DEADLINE)
        return _leave_together(mesh, max(mesh.communicator.gather_objects(body(mesh) or 0)))
    except BaseException as met:
        error = swallowed() or met
        code = exit_code(error)
        if mesh is None:
            report_before_mesh(error, launch, socket.gethostname())
            return _end(launch, code)
        ending(code)
        if not is_agreed(error):
            report_from(error, launch, mesh.host, mesh.watch.lost if mesh.watch is not None else None)
            return _end(launch, code)
        if mesh.is_root:
            report(error)
        try:  # in step: all ranks know of the error
            return _leave_together(mesh, code)
        except CommunicationError:
            return _end(launch, code)


def leave(code: int) -> NoReturn:
    """End a command's process with `code` after its work. Collective under MPI, as MPI's finalisation is.

    Skips the interpreter's shutdown: native threads of the transports can abort in it, and a finished job would fail
    (seen once in eighty jobs of three ranks).
    """
    flush()
    module = initialised()
    if module is not None:
        module.Finalize()
    end(code)


def open_mesh(
    launch: Launch, environ: MutableMapping[str, str], transport: str = "auto", deadline: float | None = None
) -> Mesh:
    """Return the mesh of this job on every rank; `mesh.close()` ends it. Without a deadline there is no watch.
    Collective.

    Raises ConfigError for a transport that is not available, CommunicationError if the ranks do not find each other.
    """
    one_of("transport", transport, TRANSPORTS)
    host = socket.gethostname()
    # MASTER_ADDR and MASTER_PORT replace MPI if mpi4py is not installed.
    without_mpi = environ.get("MASTER_ADDR") and environ.get("MASTER_PORT") and not importlib.util.find_spec("mpi4py")
    by_mpi = transport == "mpi" or (launch.launcher in MPI_LAUNCHERS and not without_mpi)
    world = load_world(launch) if launch.size > 1 and by_mpi else None
    if launch.size > 1:
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost store prints a page of C++ frames
    with without_collections("torch"):
        import torch

        from tiledseg.comm.collectives import Communicator
        from tiledseg.comm.mesh import KINDS, Mesh, choose_transport, fair_threads, gather_facts
        from tiledseg.memory.device import api, check_version, is_gpu, local_device

    check_version()
    device = local_device(launch.local_rank)
    if is_gpu(device):
        api(device).set_device(device)
    if launch.size == 1:
        if transport in KINDS:
            choose_transport(transport, gather_facts(Communicator(), device, host))
        return Mesh(launch, Communicator(), device, "serial", host)
    control, watch = _connect(launch, environ, world, transport, deadline)
    facts = gather_facts(control, device, host)
    chosen = choose_transport(transport, facts)
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(fair_threads(launch.rank, facts))
    if chosen not in KINDS:
        return Mesh(launch, control, device, chosen, host, watch)
    # Gloo's group carries objects and CPU tensors. torch's own threads would abort a process whose peer is lost without
    # naming the peer; the watch ends the job instead.
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    from tiledseg.comm.transport_torch import all_ranks, peer_errors

    with peer_errors("start of NCCL"):
        return Mesh(launch, all_ranks(gpu_of=device), device, chosen, host, watch)


@contextmanager
def joined_mesh() -> Iterator[Mesh]:
    """Yield the mesh of a user's program: all ranks of torch's default process group. Collective.

    If there is no default group, the ranks of a launcher get one, which stays open until the program exits. The mesh
    has a process group of its own, so that its messages and the program's never mix. This group closes with the mesh,
    but not if one rank fails alone: its peers notice the end of its process. The group is Gloo's: tensors of GPUs
    travel through host memory (a command's own mesh has NCCL).
    """
    import torch.distributed as dist

    from tiledseg.comm.mesh import Mesh
    from tiledseg.comm.transport_torch import of_ranks, peer_errors
    from tiledseg.memory.device import local_device

    launch = detect(os.environ)
    if not (dist.is_available() and dist.is_initialized()):
        opened = open_mesh(launch, os.environ, "auto" if launch.size == 1 else "gloo")
        if launch.size == 1:
            yield opened
            return
    host, rank, size = socket.gethostname(), dist.get_rank(), dist.get_world_size()
    with peer_errors("start of the process group"):
        communicator = of_ranks(range(size), with_nccl=False)
    assert communicator is not None, "every rank is among all"
    hosts = communicator.gather_objects(host)
    launch = Launch(rank, size, hosts[:rank].count(host), hosts.count(host), "torch")
    mesh = Mesh(launch, communicator, local_device(launch.local_rank), "gloo", host)
    try:
        yield mesh
    except Exception as error:  # not `except InputError`: the name is gone when the interpreter ends this generator
        if isinstance(error, InputError) and is_agreed(error):
            mesh.close()
        raise
    mesh.close()


@contextmanager
def without_collections(module: str) -> Iterator[None]:
    """Import `module` inside, without garbage collection, which takes a fifth of the time of torch's import and finds
    nothing. Do nothing if the module is already imported."""
    is_new, was_on = module not in sys.modules, gc.isenabled()
    if is_new:
        gc.disable()
    try:
        yield
    finally:
        if is_new:
            gc.freeze()
        if was_on:
            gc.enable()


def _connect(
    launch: Launch, environ: MutableMapping[str, str], world: Any | None, transport: str, deadline: float | None
) -> tuple[Communicator, Watch | None]:
    """Connect the ranks by MPI if it is the transport, else by Gloo, and start their watch. Collective."""
    import torch.distributed as dist

    from tiledseg.comm.rendezvous import await_all_ranks, gloo_interface, open_store
    from tiledseg.comm.transport_torch import COLLECTIVE_TIMEOUT, all_ranks, peer_errors
    from tiledseg.comm.watch import Watch
    from tiledseg.memory.device import gloo_connects

    check_open_files(launch)
    by_mpi = transport == "mpi"
    if by_mpi:
        check_threads(initialised())
    elif (interface := gloo_interface(launch)) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # ranks connect when they first talk
    watch = None
    if deadline is not None or not by_mpi:
        store = open_store(launch, environ, world)
        watch = None if deadline is None else Watch(store, launch, environ, deadline)
        await_all_ranks(store, launch)
        if watch is not None:
            watch.start()
    if by_mpi and world is not None:
        from tiledseg.comm.transport_mpi import MpiCommunicator

        return MpiCommunicator(world), watch
    with peer_errors("start of the process group"), gloo_connects():
        dist.init_process_group(
            "gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=COLLECTIVE_TIMEOUT
        )
    return all_ranks(), watch


def check_open_files(launch: Launch) -> None:
    """Raise ConfigError, before any rank waits for another, if this rank's limit of open files is too low."""
    keeps_store = launch.is_root and launch.launcher != "torchrun"  # torchrun's own process keeps it
    least = open_files_needed(launch.size, keeps_store)
    allow_open_files(1024 + 4 * launch.size, least, f"on rank {launch.rank} of {launch.size}")


def _leave_together(mesh: Mesh, code: int) -> int:
    """Close the mesh once all ranks are here. Rank 0 returns the job's code, after the others had time to leave."""
    flush()
    mesh.close()
    if not mesh.is_root:
        return 0
    if code and mesh.size > 1:
        time.sleep(_HEAD_START_SECONDS)
    return code


def _end(launch: Launch, code: int) -> int:
    """End this process, and with it the job, without waiting for a peer. Returns only in a job of one rank.

    MPI's finalisation would wait for the others, so MPI aborts. Without MPI the process leaves at once; its launcher,
    or its closed connections, end the others.
    """
    flush()
    if launch.size == 1:
        return code
    wait_until_read()
    module = initialised()
    if module is not None:
        module.COMM_WORLD.Abort(code)
    os._exit(code)


def load_world(launch: Launch) -> MPI.Intracomm:
    """Initialise MPI and return COMM_WORLD. Raises ConfigError unless its rank and size are those of `launch`.

    Collective: all ranks call it at the start of a job. mpi4py itself requests calls from several threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{launch.launcher} started {launch.size} ranks but mpi4py cannot be used ({first_line(error)}): "
            "pip install mpi4py, or start with torchrun"
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.size):
        raise ConfigError(
            f"{launch.launcher} says rank {launch.rank} of {launch.size} but MPI ({_library(MPI)}) says rank "
            f"{world.rank} of {world.size}: use the launcher of the MPI that mpi4py was built with (srun "
            "needs --mpi=pmix)"
        )
    return world


def check_threads(module: Any) -> None:
    """Raise ConfigError if MPI, given as mpi4py's module, allows calls from the main thread only.

    Autograd's thread of a GPU starts its halo exchanges and gradient sums.
    """
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise ConfigError(
            f"MPI ({_library(module)}) provides thread level {module.Query_thread()}, but transport mpi needs "
            f"{module.THREAD_SERIALIZED} (MPI_THREAD_SERIALIZED), since autograd calls it from a thread of its own: "
            "use an MPI with threads, or transport gloo or nccl"
        )


def _library(module: Any) -> str:
    return str(module.Get_library_version()).split(",")[0].strip("\0\n ")


def initialised() -> Any | None:
    """Return mpi4py's module if MPI is initialised and not yet finalised in this process, else None. Imports
    nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module
