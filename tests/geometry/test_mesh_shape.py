"""Laws of the ranks of a mesh."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tiledseg.errors import GeometryError
from tiledseg.geometry.sharing.mesh_shape import MeshPosition, MeshShape

few = st.integers(1, 5)
shapes = st.builds(MeshShape, few, few, few, few)


@law
@given(shapes)
def test_each_place_has_one_rank_and_stages_count_first(shape: MeshShape) -> None:
    places = itertools.product(*map(range, (shape.replicas, shape.rows, shape.cols, shape.stages)))
    places = [MeshPosition(*place) for place in places]
    assert [shape.rank_at(place) for place in places] == list(range(shape.ranks))
    assert [shape.position(rank) for rank in range(shape.ranks)] == places


@law
@given(shapes, st.integers(0, 10))
def test_ranks_beyond_the_mesh_own_nothing(shape: MeshShape, beyond: int) -> None:
    assert shape.position(shape.ranks + beyond) is None


@law
@given(shapes)
def test_the_ranks_of_an_image_are_neighbours_in_the_job(shape: MeshShape) -> None:
    replicas = [shape.position(rank).replica for rank in range(shape.ranks)]
    assert replicas == sorted(replicas)
    assert all(replicas.count(r) == shape.ranks_per_image * shape.stages for r in range(shape.replicas))


@law
@given(shapes)
def test_groups_of_ranks_share_what_they_are_named_for(shape: MeshShape) -> None:
    for rank in range(shape.ranks):
        here = shape.position(rank)
        pipeline = [shape.position(r) for r in shape.pipeline(rank)]
        assert pipeline == [here._replace(stage=stage) for stage in range(shape.stages)]
        assert {shape.position(r).stage for r in shape.holders(here.stage)} == {here.stage}
        assert rank in shape.holders(here.stage)
        blocks = [shape.position(r) for r in shape.blocks(here.replica, here.stage)]
        assert blocks[here.row * shape.cols + here.col] == here


@pytest.mark.parametrize("sides", [(0, 1, 1, 1), (1, 0, 2, 1), (2, 2, -1, 1), (1, 1, 1, 0)])
def test_an_axis_without_ranks_is_refused(sides: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="give at least 1 along each axis"):
        MeshShape(*sides)
