"""The laws of the collectives, over every transport and at any number of ranks, one included."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.errors import CommunicationError

SUMMED = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4, 5), (100_003,)]
COPIED = [*SUMMED, torch.bool, torch.uint8, torch.complex64]


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


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_over_ranks(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = small_integers(mesh.rank, shape, dtype)
    expected = sum(small_integers(rank, shape, torch.float64) for rank in range(mesh.size))
    mesh.communicator.all_reduce_sum(x).wait()
    assert x.dtype == dtype
    assert torch.equal(x.double(), torch.as_tensor(expected))


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
def test_sum_of_a_parameter_gradient(mesh: Mesh) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    (weight * (mesh.rank + 1)).sum().backward()
    assert weight.grad is not None
    mesh.communicator.all_reduce_sum(weight.grad).wait()
    assert weight.grad.tolist() == [mesh.size * (mesh.size + 1) / 2] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 64, 1000, 5000, 300_001])
def test_every_rank_holds_the_same_bits(mesh: Mesh, count: int, dtype: torch.dtype) -> None:
    """Else copies of a network would drift apart. The counts reach each algorithm of the libraries."""
    x = wild_floats(mesh.rank, count, dtype)
    mesh.communicator.all_reduce_sum(x).wait()
    assert len(set(mesh.communicator.gather_objects(digest(x)))) == 1


@pytest.mark.mpi
def test_sums_repeat_bit_for_bit(mesh: Mesh) -> None:
    sums = []
    for _ in range(3):
        x = wild_floats(mesh.rank, 10_001, torch.float32)
        mesh.communicator.all_reduce_sum(x).wait()
        sums.append(digest(x))
    assert len(set(sums)) == 1


@pytest.mark.mpi
def test_transports_agree(meshes: dict[str, Mesh]) -> None:
    """To the rounding of a sum in another order; two ranks have only one order, up to the sign of zero."""
    results = {}
    for name, mesh in meshes.items():
        x = wild_floats(mesh.rank, 10_001, torch.float64)
        mesh.communicator.all_reduce_sum(x).wait()
        results[name] = x
    size = meshes["gloo"].size
    magnitude = sum(wild_floats(rank, 10_001, torch.float64).abs() for rank in range(size))
    difference = (results["gloo"] - results["mpi"]).abs()
    assert (difference <= size * torch.finfo(torch.float64).eps * magnitude).all()
    if size <= 2:
        assert difference.max() == 0


@pytest.mark.mpi
def test_sixteen_bit_floats_are_summed_in_float32(mesh: Mesh) -> None:
    """256 + 1 rounds back to 256 in bfloat16, so that a sum in bfloat16 would lose every rank but the first."""
    x = torch.full((5,), 256.0 if mesh.rank == 0 else 1.0, dtype=torch.bfloat16)
    mesh.communicator.all_reduce_sum(x).wait()
    expected = torch.full((5,), 256.0 + mesh.size - 1).to(torch.bfloat16)
    assert torch.equal(x, expected)


@pytest.mark.mpi
def test_sums_under_way_at_once(mesh: Mesh) -> None:
    """Started in one order on all ranks, waited for in another."""
    tensors = [small_integers(mesh.rank + 100 * number, (1 + 977 * number,), torch.float32) for number in range(9)]
    works = [mesh.communicator.all_reduce_sum(tensor) for tensor in tensors]
    order = list(range(9))[::-1] if mesh.rank % 2 else [*range(0, 9, 2), *range(1, 9, 2)]
    for number in order:
        works[number].wait()
    for number, tensor in enumerate(tensors):
        shape = (1 + 977 * number,)
        expected = sum(small_integers(rank + 100 * number, shape, torch.float32) for rank in range(mesh.size))
        assert torch.equal(tensor, torch.as_tensor(expected))


@pytest.mark.mpi
def test_sum_is_its_own_adjoint(mesh: Mesh) -> None:
    """<S x, y> = <x, S y> with inner products over all ranks; small integers make both sides exact."""
    x, y = (small_integers(mesh.rank + offset, (1001,), torch.float64) for offset in (0, 50))
    sum_of_x, sum_of_y = x.clone(), y.clone()
    mesh.communicator.all_reduce_sum(sum_of_x).wait()
    mesh.communicator.all_reduce_sum(sum_of_y).wait()
    left = sum(mesh.communicator.gather_objects(torch.dot(sum_of_x, y).item()))
    right = sum(mesh.communicator.gather_objects(torch.dot(x, sum_of_y).item()))
    assert left == right
    assert left != 0


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", COPIED, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (70_001,)], ids=str)
def test_broadcast_from_any_rank(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for source in range(mesh.size):
        x = small_integers(mesh.rank, shape, dtype)
        mesh.communicator.broadcast(x, source)
        assert torch.equal(x, small_integers(source, shape, dtype))


@pytest.mark.mpi
def test_broadcast_keeps_bits_and_strides(mesh: Mesh) -> None:
    patterns = torch.tensor([0x7FC00001, -0x3FFFFE, 0x7F800000, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
    whole = torch.zeros(2, 5)
    whole[1] = patterns if mesh.is_root else 5.0
    mesh.communicator.broadcast(whole.T[:, 1])
    assert torch.equal(whole.view(torch.int32)[1], patterns.view(torch.int32))
    assert whole[0].abs().sum() == 0


@pytest.mark.mpi
def test_objects(mesh: Mesh) -> None:
    mine = {"rank": mesh.rank, "words": ["a"] * (mesh.rank + 1), "none": None}
    everyone = [{"rank": rank, "words": ["a"] * (rank + 1), "none": None} for rank in range(mesh.size)]
    assert mesh.communicator.gather_objects(mine) == everyone
    for source in range(mesh.size):
        sent = mine if mesh.rank == source else None
        assert mesh.communicator.broadcast_object(sent, source) == everyone[source]


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
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64], ids=str)
def test_no_sum_of_other_dtypes(mesh: Mesh, dtype: torch.dtype) -> None:
    with pytest.raises(CommunicationError, match=f"cannot sum {str(dtype).removeprefix('torch.')}"):
        mesh.communicator.all_reduce_sum(torch.zeros(3, dtype=dtype))
    mesh.communicator.barrier()


@pytest.mark.mpi
def test_no_broadcast_from_outside(mesh: Mesh) -> None:
    with pytest.raises(CommunicationError, match=f"no rank {mesh.size} among {mesh.size}"):
        mesh.communicator.broadcast(torch.zeros(3), mesh.size)


def test_one_rank_alone_is_the_identity() -> None:
    alone = SerialCommunicator()
    x = wild_floats(0, 100, torch.float32)
    before = x.clone()
    alone.all_reduce_sum(x).wait()
    alone.broadcast(x)
    alone.barrier()
    assert torch.equal(x, before)
    assert (alone.broadcast_object("a"), alone.gather_objects("b")) == ("a", ["b"])
    with pytest.raises(CommunicationError):
        alone.all_reduce_sum(torch.zeros(1, dtype=torch.bool))
