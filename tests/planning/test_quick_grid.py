"""The grid of least predicted time: against all candidates, each priced by a plan of its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tests.planning.cost_model.test_prices import FLAT
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.grids.quick_grid import LEAST_GAIN, forward_peak, predicted_seconds
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.user_files.machine import SOME_CPU, machine_of

NETWORK = UNet(3, base_channels=4)


def asked(machine: Machine | None, size: int = 256, ranks: int = 1, **given: object) -> RunQuestion:
    return RunQuestion(NETWORK, (Extent((size, size)),), ranks, 1 << 40, machine=machine, **given)  # type: ignore[arg-type]


def grid(question: RunQuestion) -> tuple[int, int]:
    return plan_run(question).tilings[0].grid


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_other_candidate_is_quicker(ranks: int) -> None:
    """A map whose first touch of memory takes as long as its computing, about."""
    question = asked(replace(FLAT, first_touch=1e-6), ranks=ranks, trains=False)
    footprint, prices = network_footprint(NETWORK.graph()), Prices(NETWORK.graph(), 4, 4, question.machine, ranks)

    def seconds(shape: tuple[int, int]) -> float:
        return predicted_seconds(make_tiling((256, 256), shape, footprint), prices, trains=False)

    others = [
        (r, c) for r, c in itertools.product((1, 2, 3, 4, 6, 8), repeat=2) if r * c >= ranks and r <= 2 * c <= 4 * r
    ]
    assert seconds(grid(question)) <= min(map(seconds, others)) * (1 + LEAST_GAIN)


def test_the_fewest_tiles_stay_where_nothing_is_known_or_gained() -> None:
    assert grid(asked(None)) == (1, 1)
    assert grid(asked(FLAT)) == (1, 1), "halos cost, and nothing is gained"
    assert grid(asked(FLAT, trains=False)) == (1, 1)


def test_a_map_minds_the_memory_that_it_touches_first() -> None:
    chosen = grid(asked(replace(FLAT, first_touch=1e-6), trains=False))
    assert chosen > (1, 1)
    assert grid(asked(replace(FLAT, first_touch=1e-6))) == (1, 1), "of a training's many steps only the first one does"


def test_a_large_map_on_some_cpu_has_more_tiles_and_training_has_not() -> None:
    """As was measured: `docs/plan.md`."""
    machine = machine_of(SOME_CPU)
    of_map, of_training = UNet(4, base_channels=12, classes=5), UNet(5, base_channels=8, classes=5)
    mapped = RunQuestion(of_map, (Extent((4096, 4096)),), 1, 12 << 30, machine=machine, trains=False)
    trained = RunQuestion(of_training, (Extent((2048, 2048)),), 1, 12 << 30, machine=machine)
    assert 4 <= math.prod(grid(mapped)) <= 16
    assert grid(trained) == (1, 1)


def test_a_grid_that_is_given_stays() -> None:
    assert grid(asked(FLAT, grid=(3, 2))) == (3, 2)


def test_memory_of_a_forward_pass() -> None:
    """Two levels by hand, values a pixel: the decoder's concatenation beside what it is made of, or the convolution
    that reads it."""
    graph = UNet(2, base_channels=8).graph()
    pixels = 64 * 64
    assert forward_peak(graph, 4, (64, 64), 4) == 4 * pixels * max(8 + 8 + 16, 16 + 8, 4 + 8)
