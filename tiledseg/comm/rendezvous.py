"""The rendezvous of a torch.distributed job: a key-value store that rank 0 (or torchrun) keeps."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from tiledseg.comm.doing import name_ranks
from tiledseg.comm.launch import Launch, first_host
from tiledseg.errors import CommunicationError, ConfigError, first_line

if TYPE_CHECKING:
    from mpi4py import MPI

LOOPBACK = "127.0.0.1"
MANY_RANKS = 1024  # above it the store needs its libuv backend (the only one used here), and ranks more time to arrive
# Ports that Linux does not hand out by itself (32768 and up) and that services rarely use.
_FIRST_PORT, _PORTS = 15000, 15000


def arrival_timeout(size: int) -> timedelta:
    """Return the time that ranks wait for each other at the start: Python starts slowly on 1000 nodes."""
    return timedelta(minutes=30 if size > MANY_RANKS else 5)


def open_store(launch: Launch, environ: Mapping[str, str], world: MPI.Intracomm | None) -> dist.Store:
    """Return the store of this job, on every rank. Collective.

    torchrun keeps it at MASTER_ADDR:MASTER_PORT. With MPI, rank 0 takes a free port, which `world` broadcasts. Else the
    store is at MASTER_ADDR and MASTER_PORT if they are set, or (srun) on the first host of the step, at a port derived
    from the job's number. Raises ConfigError or CommunicationError.
    """
    if launch.launcher == "torchrun":
        _master(environ, launch)
        return next(dist.rendezvous("env://", launch.rank, launch.size, timeout=arrival_timeout(launch.size)))[0]
    if world is not None:
        if not launch.is_root:
            hosts, port = world.bcast(None)
            return _store(launch, first_reachable(hosts, port, arrival_timeout(launch.size).total_seconds()), port)
        store = _store(launch, LOOPBACK, 0)
        own = [socket.gethostname(), socket.getfqdn(), *_addresses().values()]
        world.bcast(([LOOPBACK] if launch.one_node else own, store.port))
        return store
    host, port = _master(environ, launch)
    try:
        return _store(launch, host, port)
    except RuntimeError as error:
        where = f"{host}:{port} ({first_line(error)})"
        if launch.is_root:
            raise ConfigError(f"cannot keep the rendezvous at {where}: set MASTER_PORT") from error
        raise CommunicationError(f"rank 0 was not found at {where}: set MASTER_ADDR") from error


def await_all_ranks(store: dist.Store, launch: Launch) -> None:
    """Return once every rank has called it. Collective. Raises CommunicationError that names the late ranks.

    The process group that follows has the far longer timeout of its collectives: only the newest torch can change it.
    """
    store.set(f"rank {launch.rank} is here", "")
    if store.add("ranks here", 1) == launch.size:
        store.set("all ranks are here", "")
    timeout = arrival_timeout(launch.size)
    try:
        store.wait(["all ranks are here"], timeout)
    except RuntimeError as error:
        # One rank looks for the late ones and tells all that wait: together they would ask size squared times.
        if store.add("ranks that wait in vain", 1) == 1:
            late = [rank for rank in range(launch.size) if not store.check([f"rank {rank} is here"])]
            store.set(
                "who is late",
                f"{len(late)} of {launch.size} ranks did not arrive within {timeout.total_seconds():g} s: "
                f"{name_ranks(late)}; start them together, or look for what holds them up",
            )
        raise CommunicationError(store.get("who is late").decode()) from error


def _store(launch: Launch, host: str, port: int) -> dist.TCPStore:
    """Open the store without waiting for other ranks."""
    return dist.TCPStore(
        host,
        port,
        launch.size,
        is_master=launch.is_root,
        timeout=arrival_timeout(launch.size),
        wait_for_workers=False,
        use_libuv=True,
    )


def _master(environ: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT if both are set, else the address given by Slurm's variables."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address and port:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"MASTER_PORT={port} is not a port: use a number from 1 to 65535")
        return address, int(port)
    if address or port:
        raise ConfigError(f"MASTER_ADDR={address} but MASTER_PORT={port}: set both or neither")
    if launch.launcher == "slurm":
        return slurm_master(environ, launch)
    raise ConfigError(
        f"{launch.launcher} started {launch.size} ranks but MASTER_ADDR and MASTER_PORT are not set: set both, or "
        "start with mpirun and mpi4py installed"
    )


def slurm_master(environ: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Return the step's first host, and a port that differs between jobs and between their steps. Pure."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not nodes or not job.isdecimal() or not step.isdecimal():
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes} SLURM_JOB_ID={job or None} SLURM_STEP_ID={step}: not enough to find rank 0; "
            "set MASTER_ADDR and MASTER_PORT"
        )
    port = _FIRST_PORT + (int(job) + 7919 * int(step)) % _PORTS
    return (LOOPBACK if launch.one_node else first_host(nodes)), port


def first_reachable(hosts: Sequence[str], port: int, seconds: float, attempt_seconds: float = 5.0) -> str:
    """Return the first of `hosts` that answers at `port`, in several rounds. Raises CommunicationError after `seconds`.

    `hosts` are all names and addresses of rank 0's node: a name may not resolve on another node, or to its loopback.
    """
    end = time.monotonic() + seconds
    while True:
        for host in dict.fromkeys(hosts):
            try:
                socket.create_connection((host, port), timeout=attempt_seconds).close()
                return host
            except OSError:
                continue
        if time.monotonic() > end:
            tried = ", ".join(dict.fromkeys(hosts))
            raise CommunicationError(f"rank 0 cannot be reached at port {port} of {tried}: set MASTER_ADDR")
        time.sleep(0.5)


def gloo_interface(launch: Launch) -> str | None:
    """Return the network interface for Gloo, or None if Gloo's own choice is right.

    Gloo binds to the address of the host's name. In a bare container the name may not resolve; on Debian it resolves to
    127.0.1.1, which other nodes cannot reach. On one node the loopback always works.
    """
    if launch.one_node:
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == LOOPBACK), None)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    if not address.startswith("127."):
        return None
    return next(iter(_addresses()), None)


def _addresses() -> dict[str, str]:
    """Return the IPv4 addresses of the network interfaces except loopback, the default route's first."""
    found, default = {name: _address_of(name) or LOOPBACK for _, name in socket.if_nameindex()}, None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: a datagram socket
        default = str(probe.getsockname()[0])
    others = {name: address for name, address in found.items() if not address.startswith("127.")}
    return dict(sorted(others.items(), key=lambda item: item[1] != default))


def _address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address (SIOCGIFADDR); None if it has none or the system is not Linux."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])
