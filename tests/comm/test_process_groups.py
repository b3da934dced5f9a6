"""Groups of a part of the job's ranks, also for tensors that say they lie on a GPU where no NCCL was started."""

from __future__ import annotations

import threading

import pytest
import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transport_torch import peer_errors
from tiledseg.errors import CommunicationError


class SaysCuda(torch.Tensor):
    """A tensor of the CPU that says to this project that it lies on a GPU; what torch makes of it is a plain one."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def on_a_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(SaysCuda)


@pytest.mark.mpi(min_size=4)
def test_gpu_tensors_over_gloo_are_summed_over_their_part_alone(mesh: Mesh) -> None:
    """A group that is None stands for the whole job in torch: a part of two ranks of four summed ones to four."""
    part = mesh.communicator.split([[0, 1], [2, 3]])
    if mesh.rank < 4:
        x = on_a_gpu(1.0, float(mesh.rank))
        part.all_reduce_sum(x).wait()
        assert x.tolist() == [2.0, 1.0 if mesh.rank < 2 else 5.0]
        y = on_a_gpu(float(mesh.rank))
        part.broadcast(y, 1)
        assert y.tolist() == [1.0 if mesh.rank < 2 else 3.0]
    part.close()


@pytest.mark.mpi
def test_mpi_takes_calls_from_another_thread(meshes: dict[str, Mesh]) -> None:
    """As autograd's thread of a GPU makes them."""
    mesh = meshes["mpi"]
    x = torch.ones(1000)
    thread = threading.Thread(target=lambda: mesh.communicator.all_reduce_sum(x).wait())
    thread.start()
    thread.join()
    assert x.unique().tolist() == [mesh.size]


def test_out_of_memory_is_no_lost_peer() -> None:
    with pytest.raises(torch.OutOfMemoryError), peer_errors("all-reduce"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), peer_errors("all-reduce"):
        torch.empty(2**55, dtype=torch.uint8)
    lost = "all-reduce failed, a peer may be lost: Connection closed"
    with pytest.raises(CommunicationError, match=lost), peer_errors("all-reduce"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:49")
