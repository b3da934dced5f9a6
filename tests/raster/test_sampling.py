from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.errors import ConfigError
from tiledseg.raster.samples.sampling import Position, Sampler, TileReference, deal

counts = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(tuple)
law = settings(derandomize=True, max_examples=100, deadline=None)


@law
@given(counts, st.integers(0, 2**40), st.integers(0, 50), st.data())
def test_every_tile_occurs_once_an_epoch(
    tiles_per_image: tuple[int, ...], seed: int, epoch: int, data: st.DataObject
) -> None:
    number = data.draw(st.none() | st.integers(1, sum(tiles_per_image)))
    sampler = Sampler(tiles_per_image, seed, number)
    steps = sampler.steps(epoch)
    every = Counter(TileReference(i, t) for i, n in enumerate(tiles_per_image) for t in range(n))
    assert Counter(tile for step in steps for tile in step) == every
    assert len(steps) == sampler.steps_per_epoch
    if number is None:
        assert all({tile.image for tile in step} == {step[0].image} for step in steps)
    else:
        assert [len(step) for step in steps[:-1]] == [number] * (len(steps) - 1)
        assert 1 <= len(steps[-1]) <= number


@law
@given(st.lists(st.integers(1, 3000), max_size=70), st.integers(1, 80))
def test_the_ranks_together_load_the_step(costs: list[int], size: int) -> None:
    step = tuple(enumerate(costs))
    shares = deal(step, size, lambda tile: tile[1])
    assert len(shares) == size
    assert sorted(tile for share in shares for tile in share) == list(step)
    assert all(list(share) == sorted(share) for share in shares)
    assert shares == deal(step, size, lambda tile: tile[1])
    heaviest = max(sum(tile[1] for tile in share) for share in shares)
    least = max([-(-sum(costs) // size), *costs], default=0)
    assert heaviest <= 4 / 3 * least + max(costs, default=0) / 3  # Graham's bound, loosened to integers


def test_equal_tiles_are_dealt_evenly() -> None:
    shares = deal(range(64), 4, lambda tile: 1440 * 1440)
    assert shares == [tuple(range(i, 64, 4)) for i in range(4)]
    assert [len(share) for share in deal(range(64), 5, lambda tile: 1)] == [13, 13, 13, 13, 12]
    assert [len(share) for share in deal(range(2), 4, lambda tile: 1)].count(1) == 2


def test_the_order_is_the_documented_one() -> None:
    """A change here breaks the resuming of every run: it must be on purpose."""
    assert [step[0].image for step in Sampler((1,) * 8, seed=0).steps(0)] == [4, 2, 5, 0, 6, 7, 1, 3]


@law
@given(counts, st.integers(0, 99), st.integers(0, 40))
def test_resuming_goes_on_where_the_run_stood(tiles_per_image: tuple[int, ...], seed: int, cut: int) -> None:
    sampler = Sampler(tiles_per_image, seed, 1)
    whole = list(sampler.steps_from(Position(0, 0), epochs=2))
    assert [position for position, _ in whole] == sorted(position for position, _ in whole)
    at = cut % len(whole)
    assert list(sampler.steps_from(whole[at][0], epochs=2)) == whole[at:]
    assert list(sampler.steps_from(Position(0, sampler.steps_per_epoch), epochs=2)) == whole[len(whole) // 2 :]


def test_a_step_larger_than_the_data_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"tiles_per_step is 9.* have 8 tiles") as error:
        Sampler((4, 4), seed=0, tiles_per_step=9)
    assert "\n" not in str(error.value)
