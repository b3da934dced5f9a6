"""The mesh of a program that is none of our commands: over the process group that is there, or its launcher's ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tiledseg.comm.failure import is_agreed
from tiledseg.comm.launch import Launch, detect
from tiledseg.comm.mesh import Mesh, local_device
from tiledseg.comm.session import open_mesh
from tiledseg.errors import InputError


@contextmanager
def joined_mesh() -> Iterator[Mesh]:
    """Yield the mesh of all ranks of torch's default process group. Collective.

    Where there is none, ranks that a launcher has started get one, which stays until the program's exit closes it. The
    mesh has a process group of its own, so that its messages and the program's never meet. This group ends with the
    mesh, but not where a rank fails by itself: its peers learn of that by the end of its process. The group is Gloo's:
    tensors of GPUs travel through host memory (a command's own mesh has NCCL).
    """
    import torch.distributed as dist

    from tiledseg.comm.transports.process_groups import close_at_exit

    launch = detect(os.environ)
    owns_default = not (dist.is_available() and dist.is_initialized())
    if owns_default:
        opened = open_mesh(launch, os.environ, "auto" if launch.size == 1 else "gloo")
        if launch.size == 1:
            yield opened
            return
    close_at_exit(owns_default)
    mesh = _over_default_group()
    try:
        yield mesh
    except Exception as error:  # not InputError by name: where the interpreter ends this generator, the name is gone
        if isinstance(error, InputError) and is_agreed(error):
            mesh.close()
        raise
    mesh.close()


def _over_default_group() -> Mesh:
    import torch.distributed as dist

    from tiledseg.comm.transports.process_groups import new_groups
    from tiledseg.comm.transports.transport_torch import TorchCommunicator, peer_errors

    host, rank, size = socket.gethostname(), dist.get_rank(), dist.get_world_size()
    with peer_errors("start of the process group"):
        communicator = TorchCommunicator(new_groups(range(size), with_nccl=False), is_guest=True)
    hosts = communicator.gather_objects(host)
    launch = Launch(rank, size, hosts[:rank].count(host), hosts.count(host), "torch")
    return Mesh(launch, communicator, local_device(launch), "gloo", host)
