"""Laws of the ranks of a mesh."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tiledseg.errors import GeometryError
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape

few = st.integers(1, 5)
shapes = st.builds(MeshShape, few, few, few, few)


@pytest.mark.parametrize("sides", [(0, 1, 1, 1), (1, 0, 2, 1), (2, 2, -1, 1), (1, 1, 1, 0)])
def test_an_axis_without_ranks_is_refused(sides: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="give at least 1 along each axis"):
        MeshShape(*sides)


@law
@given(shapes, st.integers(0, 10))
def test_each_place_has_one_rank_and_groups_share_what_they_are_named_for(shape: MeshShape, beyond: int) -> None:
    """Stages count first, replicas last; ranks beyond the mesh own nothing."""
    counts = map(range, (shape.replicas, shape.rows, shape.cols, shape.stages))
    places = [MeshPosition(*place) for place in itertools.product(*counts)]
    assert [shape.rank_at(place) for place in places] == list(range(shape.ranks))
    assert [shape.position(rank) for rank in range(shape.ranks)] == places
    assert shape.position(shape.ranks + beyond) is None
    for rank, here in enumerate(places):
        assert [places[r] for r in shape.pipeline(rank)] == [here._replace(stage=s) for s in range(shape.stages)]
        assert {places[r].stage for r in shape.holders(here.stage)} == {here.stage}
        assert rank in shape.holders(here.stage)
        assert places[shape.blocks(here.replica, here.stage)[here.row * shape.cols + here.col]] == here
