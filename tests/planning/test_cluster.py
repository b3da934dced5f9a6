"""The cluster's part of a plan: rounds of an epoch, and GPUs that wait in the last one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.planning.answer.report import cluster_part
from tiledseg.planning.question import Question

NETWORK = UNet(3)
law = settings(derandomize=True, max_examples=200, deadline=None)


def test_the_papers_epoch() -> None:
    part = cluster_part(Question((6000, 6000), NETWORK, (8, 8), images=100, gpus=1200), (8, 8))
    assert (part["tiles"], part["rounds"], part["idle_gpus_last_round"]) == (6400, 6, 800)
    assert round(100 * part["utilisation"]) == 89
    assert part["nodes_per_image"] == 10.67


@law
@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 2000))
def test_dealing_tiles_one_by_one_takes_these_rounds(images: int, tiles: int, gpus: int) -> None:
    part = cluster_part(Question((6000, 6000), NETWORK, (1, tiles), images=images, gpus=gpus), (1, tiles))
    left, rounds, last = images * tiles, 0, 0
    while left:
        last = min(gpus, left)
        left, rounds = left - last, rounds + 1
    assert part["rounds"] == rounds
    assert part["idle_gpus_last_round"] == gpus - last
    assert part["utilisation"] == round(images * tiles / (rounds * gpus), 4)
