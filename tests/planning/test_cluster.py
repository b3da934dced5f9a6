from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.planning.answer.cluster import Epoch, nodes_per_image, ranks_per_image

law = settings(derandomize=True, max_examples=200, deadline=None)


def test_the_papers_epoch() -> None:
    epoch = Epoch(images=100, tiles=64, ranks=1200)
    assert epoch.all_tiles == 6400
    assert epoch.rounds == 6
    assert epoch.idle == 800
    assert round(100 * epoch.utilisation) == 89
    assert round(nodes_per_image(64, 6), 2) == 10.67


@law
@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 2000))
def test_dealing_tiles_one_by_one_takes_these_rounds(images: int, tiles: int, ranks: int) -> None:
    epoch = Epoch(images, tiles, ranks)
    left, rounds, last = images * tiles, 0, 0
    while left:
        last = min(ranks, left)
        left, rounds = left - last, rounds + 1
    assert epoch.rounds == rounds
    assert epoch.idle == ranks - last
    assert epoch.utilisation == images * tiles / (rounds * ranks)
    assert 0 < epoch.utilisation <= 1


@law
@given(st.integers(1, 2000), st.integers(1, 200))
def test_ranks_per_image_is_the_least_that_busies_all(ranks: int, images: int) -> None:
    tiles = ranks_per_image(ranks, images)
    assert tiles * images >= ranks
    assert (tiles - 1) * images < ranks
