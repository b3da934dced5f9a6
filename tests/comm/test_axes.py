"""Parts of a communicator and the axes of a mesh: each part is a communicator of its own, and the whole goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.comm.messages import letter, swap_letters
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Axes, Mesh, open_axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.sharing.decomposition import MeshShape


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
    swap_letters(part.point_to_point(), part.rank, pairs, lambda a, b: 10 + a + 2 * b)


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
