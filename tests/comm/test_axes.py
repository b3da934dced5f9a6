"""Parts of a communicator and the axes of a mesh: each part is a communicator of its own, and the whole goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.comm.messages import letter, swap_letters
from tiledseg.comm.axes import Axes, open_axes, serial_axes
from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import Communicator, SerialCommunicator
from tiledseg.errors import CommunicationError, ConfigError
from tiledseg.geometry.sharing.mesh_shape import MeshPosition, MeshShape


def check_part(part: Communicator, members: list[int], me: int) -> None:
    """Every collective of a part, for one whose ranks are `members` of the whole in this order."""
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


def check_messages(part: Communicator) -> None:
    """Messages within a part, whose peers count as the part does."""
    messages = part.point_to_point()
    pairs = [(a, b) for a in range(part.size) for b in range(part.size) if a != b]
    swap_letters(messages, part.rank, pairs, lambda a, b: 10 + a + 2 * b)


def shapes(size: int) -> Iterator[MeshShape]:
    """Every mesh shape of at most `size` ranks, but at most seven."""
    sides = itertools.product(range(1, size + 1), repeat=4)
    every = [shape for four in sides if (shape := MeshShape(*four)).ranks <= size]
    return iter(every[:: -(-len(every) // 7)])


@pytest.mark.mpi
def test_rows_and_columns(mesh: Mesh) -> None:
    """Two splits of one communicator side by side, then the whole again."""
    cols = 2
    rows = [list(range(first, min(first + cols, mesh.size))) for first in range(0, mesh.size, cols)]
    columns = [list(range(col, mesh.size, cols)) for col in range(min(cols, mesh.size))]
    row, column = mesh.communicator.split(rows), mesh.communicator.split(columns)
    check_part(row, rows[mesh.rank // cols], mesh.rank)
    check_part(column, columns[mesh.rank % cols], mesh.rank)
    check_part(row, rows[mesh.rank // cols], mesh.rank)
    check_messages(row)
    check_messages(column)
    row.close()
    column.close()
    check_part(mesh.communicator, list(range(mesh.size)), mesh.rank)


@pytest.mark.mpi
def test_a_part_may_be_the_whole_in_another_order(mesh: Mesh) -> None:
    backwards = list(range(mesh.size))[::-1]
    part = mesh.communicator.split([backwards])
    check_part(part, backwards, mesh.rank)
    check_messages(part)
    part.close()
    check_part(mesh.communicator, backwards[::-1], mesh.rank)


@pytest.mark.mpi
def test_a_rank_in_no_group_is_alone(mesh: Mesh) -> None:
    """And so is one that is a group by itself; the others go on without them."""
    chosen = list(range(1, mesh.size))
    for groups in ([chosen] if chosen else [], [[0], chosen] if chosen else [[0]]):
        part = mesh.communicator.split(groups)
        check_part(part, chosen if mesh.rank in chosen else [mesh.rank], mesh.rank)
        assert isinstance(part, SerialCommunicator) == (part.size == 1)
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


@pytest.mark.mpi
def test_parts_can_be_made_and_closed_again_and_again(mesh: Mesh) -> None:
    for number in range(4):
        first = 1 + number % mesh.size
        groups = [list(range(first)), list(range(first, mesh.size))]
        part = mesh.communicator.split([group for group in groups if group])
        assert sorted(part.gather_objects(mesh.rank)) == groups[mesh.rank >= first]
        part.close()
    mesh.communicator.barrier()


@pytest.mark.mpi
def test_bad_groups_are_refused_everywhere(mesh: Mesh) -> None:
    last = mesh.size - 1
    for groups, words in (
        ([[last, last]], f"rank {last} stands twice"),
        ([[0], [0]], "rank 0 stands twice"),
        ([[mesh.size]], f"no rank {mesh.size} among {mesh.size}"),
        ([[-1]], "no rank -1"),
        ([[0], []], "group 1 of 2 has no rank"),
    ):
        with pytest.raises(CommunicationError, match=words):
            mesh.communicator.split(groups)
    mesh.communicator.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_part_cannot_be_split(mesh: Mesh) -> None:
    part = mesh.communicator.split([list(range(mesh.size))])
    with pytest.raises(CommunicationError, match=f"a part of {mesh.size} ranks cannot be split"):
        part.split([[0], [1]])
    part.close()


def check_stages(axes: Axes, mesh: Mesh) -> None:
    """The stages of a block are a communicator in order of stages, and so are all that hold one stage's layers."""
    shape, position = axes.shape, axes.position
    assert position is not None
    stages = [axes.rank_of_stage(stage) for stage in range(shape.stages)]
    assert stages[position.stage] == mesh.rank
    assert axes.pipeline.gather_objects(mesh.rank) == stages
    if shape.stages > 1:  # without stages it is the job's own, of which ranks outside the mesh are too
        holders = [rank for rank in range(mesh.size) if shape.position(rank) in places(axes)]
        assert axes.weights.gather_objects(mesh.rank) == holders == shape.holders(position.stage)
    with pytest.raises(CommunicationError, match=f"no rank of stage {shape.stages} of the mesh"):
        axes.rank_of_stage(shape.stages)


def places(axes: Axes) -> list[MeshPosition]:
    """Where this rank's stage stands."""
    sides = itertools.product(range(axes.shape.replicas), range(axes.shape.rows), range(axes.shape.cols))
    return [MeshPosition(*side, axes.position.stage) for side in sides]


@pytest.mark.mpi
def test_axes_of_every_shape(mesh: Mesh) -> None:
    """Images are sums of their own; a message travels to each neighbour and back to the rank at its place."""
    for shape in shapes(mesh.size):
        axes = open_axes(mesh, shape)
        assert axes.shape == shape
        if axes.position is None:
            assert mesh.rank >= shape.ranks
            assert axes.image.size == 1
            with pytest.raises(CommunicationError, match="outside the mesh"):
                axes.rank_at(0, 0)
        else:
            replica, row, col, stage = axes.position
            assert axes.rank_at(row, col) == mesh.rank
            assert (axes.image.size, axes.image.rank) == (shape.ranks_per_image, row * shape.cols + col)
            places = [(row, col) for row in range(shape.rows) for col in range(shape.cols)]
            assert axes.image.gather_objects(mesh.rank) == [axes.rank_at(*place) for place in places]
            found = axes.image.gather_objects(axes.position)
            assert found == [MeshPosition(replica, *place, stage) for place in places]
            check_stages(axes, mesh)
            for place in ((-1, 0), (0, -1), (shape.rows, 0), (0, shape.cols)):
                with pytest.raises(CommunicationError, match=f"no rank at row {place[0]}, col {place[1]} of the mesh"):
                    axes.rank_at(*place)
            here = [axes.rank_at(*place) for place in places]
            pairs = [(a, b) for a in here for b in here if a != b]
            between = [(a, b) for a in shape.pipeline(mesh.rank) for b in shape.pipeline(mesh.rank) if a != b]
            swap_letters(axes.stage_messages, mesh.rank, between, lambda a, b: 3 + a + b)
            swap_letters(axes.point_to_point, mesh.rank, pairs, lambda a, b: 5 + a + b)
        axes.close()
    mesh.communicator.barrier()


@pytest.mark.mpi
def test_too_few_ranks_is_one_error_on_all(mesh: Mesh) -> None:
    shape = MeshShape(mesh.size, 2, 1)
    words = f"mesh of {mesh.size} x 2 x 1 .* needs {2 * mesh.size} ranks but the job has {mesh.size}: start"
    with pytest.raises(ConfigError, match=words) as caught:
        open_axes(mesh, shape)
    assert is_agreed(caught.value)
    mesh.communicator.barrier()


def test_one_rank_alone() -> None:
    axes = serial_axes()
    assert (axes.shape.ranks, axes.position, axes.rank_at(0, 0)) == (1, (0, 0, 0, 0), 0)
    assert axes.image.gather_objects("a") == ["a"]
    axes.point_to_point.start([], []).wait()
    axes.close()
