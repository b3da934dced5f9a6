"""What a mesh decides from the facts of its ranks, how ranks share results and errors, and parts side by side."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.comm.messages import letter, swap_letters
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Axes, Facts, Mesh, choose_transport, fair_threads, open_axes
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.errors import CommunicationError, ConfigError, InputError, LabelError, RasterError
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.memory.device import local_device


def node(host: str, gpus: list[str | None], cores: int = 4, backend: str = "nccl") -> list[Facts]:
    return [Facts(host, (1 << cores) - 1, gpu, backend if gpu else None) for gpu in gpus]


OWN_GPUS = [*node("a", ["a0", "a1"]), *node("b", ["b0", "b1"])]
SHARED_GPU = [*node("a", ["a0", "a1"]), *node("b", ["b0", "b0"])]
NO_GPU_ON_ONE = [*node("a", ["a0", "a1"]), *node("b", [None, None])]
OWN_XPUS = node("a", ["a0", "a1"], backend="xccl")
TWO_KINDS = [*node("a", ["a0", "a1"]), *node("b", ["b0"], backend="xccl")]


@pytest.mark.parametrize(
    ("asked", "facts", "expected"),
    [
        ("auto", OWN_GPUS, "nccl"),
        ("auto", SHARED_GPU, "gloo"),
        ("auto", NO_GPU_ON_ONE, "gloo"),
        ("auto", node("a", [None]), "gloo"),
        ("gloo", OWN_GPUS, "gloo"),
        ("mpi", SHARED_GPU, "mpi"),
        ("nccl", OWN_GPUS, "nccl"),
        ("auto", OWN_XPUS, "xccl"),
        ("xccl", OWN_XPUS, "xccl"),
        ("auto", TWO_KINDS, "gloo"),
    ],
)
def test_transport(asked: str, facts: list[Facts], expected: str) -> None:
    assert choose_transport(asked, facts) == expected


def test_nccl_that_cannot_be() -> None:
    for facts in (NO_GPU_ON_ONE, TWO_KINDS):
        with pytest.raises(ConfigError, match="needs a CUDA or ROCm GPU on every rank but rank 2 on b has none"):
            choose_transport("nccl", facts)
    with pytest.raises(ConfigError, match="transport xccl needs an XPU GPU on every rank but rank 0 on a has none"):
        choose_transport("xccl", TWO_KINDS)
    with pytest.raises(ConfigError, match="ranks 2 and 3 share one on b"):
        choose_transport("nccl", SHARED_GPU)


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        ([Facts("a", 0b1111, None)] * 2 + [Facts("b", 0b1111, None)] * 4, [2, 2, 1, 1, 1, 1]),
        ([Facts("a", 0b0011, None), Facts("a", 0b1100, None)], [2, 2]),  # bound to cores of their own
        ([Facts("a", 0b11, None)] * 3, [1, 1, 1]),
    ],
)
def test_ranks_of_a_host_share_its_cores(facts: list[Facts], threads: list[int]) -> None:
    assert [fair_threads(rank, facts) for rank in range(len(facts))] == threads


@pytest.mark.parametrize(("kind", "float64", "index"), [("cuda", True, 3), ("xpu", True, 3), ("xpu", False, None)])
def test_device_of_a_rank(monkeypatch: pytest.MonkeyPatch, kind: str, float64: bool, index: int | None) -> None:
    """A rank takes the GPU of its local rank; MPS, and an XPU without float64, are passed over."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "get_device_properties", lambda *_: SimpleNamespace(has_fp64=float64))
    monkeypatch.setattr(module, "device_count", lambda: 6)
    cpu = torch.device("cpu")
    assert local_device(3) == (cpu if index is None else torch.device(kind, index))
    monkeypatch.setattr(module, "device_count", lambda: 1)
    assert local_device(3) == (cpu if index is None else torch.device(kind, 0))
    for other in (None, torch.device("mps")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, other=other: other)
        assert local_device(3) == cpu


@pytest.mark.mpi
def test_on_root_gives_every_rank_the_result_or_the_error(mesh: Mesh) -> None:
    """Nobody waits for a root that has crashed."""
    calls: list[int] = []

    def ask() -> dict[str, int]:
        calls.append(mesh.rank)
        return {"rank": mesh.rank}

    def fail() -> None:
        raise RasterError(f"a.tif is missing, says {mesh.rank}")

    assert mesh.on_root(ask) == {"rank": 0}
    assert calls == ([0] if mesh.is_root else [])
    with pytest.raises(RasterError, match=r"^a\.tif is missing, says 0$") as caught:
        mesh.on_root(fail)
    assert is_agreed(caught.value)
    with pytest.raises(ZeroDivisionError if mesh.is_root else CommunicationError) as crashed:
        mesh.on_root(lambda: 1 // 0)
    assert not is_agreed(crashed.value)


@pytest.mark.mpi
def test_the_lowest_ranks_error_is_raised_everywhere(mesh: Mesh) -> None:
    assert mesh.on_all(lambda: mesh.rank) == mesh.rank
    mine: list[InputError] = [LabelError("zero"), RasterError("one"), ConfigError("two"), ConfigError("three")]

    def fail(lowest: int) -> None:
        if mesh.rank >= lowest:
            raise mine[mesh.rank % 4]

    for lowest in range(min(mesh.size, 4)):
        with pytest.raises(type(mine[lowest])) as caught:
            mesh.on_all(lambda lowest=lowest: fail(lowest))
        assert str(caught.value) == str(mine[lowest])
        assert is_agreed(caught.value)


def check_part(part: Communicator, members: list[int], me: int) -> None:
    """Every operation of a part, for one whose ranks are `members` of the whole in this order."""
    assert (part.rank, part.size) == (members.index(me), len(members))
    assert part.gather_objects(me) == members
    x = letter(me, 0, 1001, dtype=torch.float64)
    part.all_reduce_sum(x).wait()
    assert torch.equal(x, sum(letter(rank, 0, 1001, dtype=torch.float64) for rank in members))
    for source, rank in enumerate(members):
        x = letter(me, 1, 33)
        part.broadcast(x, source)
        assert torch.equal(x, letter(rank, 1, 33))
        assert part.broadcast_object(f"from {me}", source) == f"from {rank}"
    part.barrier()
    pairs = list(itertools.permutations(range(part.size), 2))
    swap_letters(PointToPoint(part), part.rank, pairs, lambda a, b: 10 + a + 2 * b)


@pytest.mark.mpi
def test_parts_side_by_side(mesh: Mesh) -> None:
    """Rows, columns, all ranks in another order, all but the first, and each by itself; then the whole again."""
    everyone, cols = list(range(mesh.size)), 2
    cuts = [
        [everyone[first : first + cols] for first in range(0, mesh.size, cols)],
        [everyone[col::cols] for col in range(min(cols, mesh.size))],
        [everyone[::-1]],
        [[0], everyone[1:]] if mesh.size > 1 else [[0]],
        [everyone[1:]] if mesh.size > 1 else [],
    ]
    parts = [mesh.communicator.split(groups) for groups in cuts]
    for _ in range(2):
        for part, groups in zip(parts, cuts, strict=True):
            members = next((group for group in groups if mesh.rank in group), [mesh.rank])
            check_part(part, members, mesh.rank)
            assert (type(part) is Communicator) == (part.size == 1)
        check_part(mesh.communicator, everyone, mesh.rank)
    for part in parts:
        part.close()


@pytest.mark.mpi
def test_parts_sum_on_their_own_while_the_whole_sums(mesh: Mesh) -> None:
    """Sums of part and whole under way at once, and a part that sums more often than another."""
    half = [list(range(mesh.size))[::2], list(range(mesh.size))[1::2]]
    part = mesh.communicator.split([group for group in half if group])
    ones = [torch.ones(5_000) for _ in range(5)]
    works = [mesh.communicator.all_reduce_sum(ones[0])]
    works += [part.all_reduce_sum(x) for x in ones[1 : 3 + mesh.rank % 2]]
    works += [mesh.communicator.all_reduce_sum(ones[4])]
    for work in reversed(works):
        work.wait()
    expected = [mesh.size, part.size, part.size, part.size if mesh.rank % 2 else 1, mesh.size]
    assert [x[-1].item() for x in ones] == expected
    part.close()


def shapes(size: int) -> Iterator[MeshShape]:
    """Every mesh shape of at most `size` ranks, but at most seven."""
    sides = itertools.product(range(1, size + 1), repeat=4)
    every = [shape for four in sides if (shape := MeshShape(*four)).ranks <= size]
    return iter(every[:: -(-len(every) // 7)])


@pytest.mark.mpi
def test_axes_of_every_shape(mesh: Mesh) -> None:
    """Images and stages are sums of their own; a message travels to each rank of the image, and of the pipeline."""
    for shape in shapes(mesh.size):
        axes = open_axes(mesh, shape)
        if axes.position is None:
            assert mesh.rank >= shape.ranks
            assert axes.image.size == 1
        else:
            check_place(axes, mesh)
        axes.close()
    mesh.communicator.barrier()


def check_place(axes: Axes, mesh: Mesh) -> None:
    shape, (_, row, col, stage) = axes.shape, axes.position  # type: ignore[misc]
    assert axes.rank_at(row, col) == mesh.rank == axes.rank_of_stage(stage)
    here = [axes.rank_at(row, col) for row in range(shape.rows) for col in range(shape.cols)]
    stages = [axes.rank_of_stage(stage) for stage in range(shape.stages)]
    assert (axes.image.rank, axes.image.gather_objects(mesh.rank)) == (row * shape.cols + col, here)
    assert axes.pipeline.gather_objects(mesh.rank) == stages
    if shape.stages > 1:  # without stages it is the job's own, of which ranks outside the mesh are too
        assert axes.weights.gather_objects(mesh.rank) == shape.holders(stage)
        assert all(shape.position(rank).stage == stage for rank in shape.holders(stage))  # type: ignore[union-attr]
    swap_letters(axes.stage_messages, mesh.rank, list(itertools.permutations(stages, 2)), lambda a, b: 3 + a + b)
    swap_letters(axes.point_to_point, mesh.rank, list(itertools.permutations(here, 2)), lambda a, b: 5 + a + b)


@pytest.mark.mpi
def test_too_few_ranks_is_one_error_on_all(mesh: Mesh) -> None:
    shape = MeshShape(mesh.size, 2, 1)
    words = f"mesh of {mesh.size} x 2 x 1 .* needs {2 * mesh.size} ranks but the job has {mesh.size}: start"
    with pytest.raises(ConfigError, match=words) as caught:
        open_axes(mesh, shape)
    assert is_agreed(caught.value)
    mesh.communicator.barrier()
