"""The laws of the collectives, over every transport and at any number of ranks, one included."""

import ast
import itertools
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from tiledseg.comm import transport_torch
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transport_torch import peer_errors
from tiledseg.errors import CommunicationError

SUMMED = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.float16]
REFUSED = [torch.bool, torch.uint8, torch.complex64]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4, 5), (100_003,)]


@pytest.mark.parametrize("transport", ["transport_torch.py", "transport_mpi.py"])
def test_a_transport_has_all_methods_of_its_own(transport: str) -> None:
    """A forgotten one would be that of one rank alone, and do nothing. Read as text: `mpi4py` starts MPI."""
    text = Path(transport_torch.__file__).with_name(transport).read_text()
    (own,) = (each for each in ast.parse(text).body if getattr(each, "name", "").endswith("Communicator"))
    methods = {each.name for each in ast.walk(own) if isinstance(each, ast.FunctionDef)}
    asked = {name for name in vars(Communicator) if re.match(r"_[a-z]|post$|peer_errors$", name)} - {"_staged"}
    assert {"post", "_sum", "_barrier"} < asked <= methods


def small_integers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values from -7 to 7: sums over up to 16 ranks are exact in every dtype, in whatever order they are taken."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-7, 8, shape, generator=generator).to(dtype)


def wild_floats(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes over twelve decades and both signs: a sum in another order has other bits."""
    generator = torch.Generator().manual_seed(2000 + rank)
    exponents = torch.rand(count, generator=generator, dtype=torch.float64) * 12 - 6
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return (signs * 10**exponents).to(dtype)


@pytest.mark.mpi
def test_sum_over_ranks(mesh: Mesh) -> None:
    for shape, dtype in itertools.product(SHAPES, SUMMED):
        x = small_integers(mesh.rank, shape, dtype)
        expected = sum(small_integers(rank, shape, torch.float64) for rank in range(mesh.size))
        mesh.communicator.all_reduce_sum(x).wait()
        assert x.dtype == dtype
        assert torch.equal(x.double(), torch.as_tensor(expected)), (shape, dtype)


@pytest.mark.mpi
def test_sum_is_in_place_in_strided_tensors(mesh: Mesh) -> None:
    whole = torch.full((6, 8), -1.0)
    view = whole[1:5:2, 2:7].T
    view.copy_(small_integers(mesh.rank, (5, 2), torch.float32))
    mesh.communicator.all_reduce_sum(view).wait()
    expected = torch.full((6, 8), -1.0)
    expected[1:5:2, 2:7] = sum(small_integers(rank, (5, 2), torch.float32) for rank in range(mesh.size)).T
    assert torch.equal(whole, expected)


@pytest.mark.mpi
def test_every_rank_holds_the_same_bits_again_and_again(mesh: Mesh) -> None:
    """Else copies of a network would drift apart. The counts reach each algorithm of the libraries."""
    for count, dtype in itertools.product((1, 3, 64, 5000, 300_001), (torch.float32, torch.float64, torch.bfloat16)):
        sums = [wild_floats(mesh.rank, count, dtype) for _ in range(2)]
        for x in sums:
            mesh.communicator.all_reduce_sum(x).wait()
        bits = [x.view(torch.uint8).numpy().tobytes() for x in sums]
        assert len({*bits, *mesh.communicator.gather_objects(bits[0])}) == 1


@pytest.mark.mpi
def test_sixteen_bit_floats_are_summed_in_float32(mesh: Mesh) -> None:
    """256 + 1 rounds back to 256 in bfloat16, so that a sum in bfloat16 would lose every rank but the first."""
    x = torch.full((5,), 256.0 if mesh.rank == 0 else 1.0, dtype=torch.bfloat16)
    mesh.communicator.all_reduce_sum(x).wait()
    assert torch.equal(x, torch.full((5,), 256.0 + mesh.size - 1).to(torch.bfloat16))


@pytest.mark.mpi
def test_broadcast_from_any_rank(mesh: Mesh) -> None:
    shapes = [(), (0,), (5,), (3, 7), (70_001,)]
    for source, shape, dtype in itertools.product(range(mesh.size), shapes, (*SUMMED, *REFUSED)):
        x = small_integers(mesh.rank, shape, dtype)
        mesh.communicator.broadcast(x, source)
        assert torch.equal(x, small_integers(source, shape, dtype)), (source, shape, dtype)


@pytest.mark.mpi
def test_broadcast_keeps_bits_and_strides(mesh: Mesh) -> None:
    patterns = torch.tensor([0x7FC00001, -0x3FFFFE, 0x7F800000, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
    whole = torch.zeros(2, 5)
    whole[1] = patterns if mesh.is_root else 5.0
    mesh.communicator.broadcast(whole.T[:, 1])
    assert torch.equal(whole.view(torch.int32)[1], patterns.view(torch.int32))
    assert whole[0].abs().sum() == 0


@pytest.mark.mpi(min_size=2)
def test_nobody_leaves_a_barrier_before_all_have_come(mesh: Mesh) -> None:
    mesh.communicator.barrier()
    time.sleep(0.05 * mesh.rank)
    came = time.monotonic()
    mesh.communicator.barrier()
    left = time.monotonic()
    times = mesh.communicator.gather_objects((mesh.host, came, left))
    here = [(came, left) for host, came, left in times if host == mesh.host]
    assert max(came for came, _ in here) <= min(left for _, left in here)


@pytest.mark.mpi
def test_other_dtypes_are_refused(mesh: Mesh) -> None:
    for communicator in (mesh.communicator, Communicator()):
        for dtype in REFUSED:
            with pytest.raises(CommunicationError, match=f"cannot sum {str(dtype).removeprefix('torch.')}"):
                communicator.all_reduce_sum(torch.zeros(3, dtype=dtype))
    mesh.communicator.barrier()


@pytest.mark.mpi(min_size=4)
def test_gpu_tensors_over_gloo_are_summed_over_their_part_alone(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is None stands for the whole job in torch: a part of two ranks of four summed ones to four."""
    monkeypatch.setattr(transport_torch, "is_gpu", lambda device: True)  # tensors of the CPU go the way of a GPU's
    part = mesh.communicator.split([[0, 1], [2, 3]])
    if mesh.rank < 4:
        x = torch.tensor([1.0, float(mesh.rank)])
        part.all_reduce_sum(x).wait()
        assert x.tolist() == [2.0, 1.0 if mesh.rank < 2 else 5.0]
        y = torch.tensor([float(mesh.rank)])
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
