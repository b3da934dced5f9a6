"""No balance of a pipeline is quicker than the least that is said of all."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import pytest

from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.chunk_orders import ChunkTimes
from tiledseg.pipeline.schedule import ChunkMap, Route, program
from tiledseg.pipeline.simulation import simulate
from tiledseg.planning.search.pipeline_bound import least_flush


def balances(layers: int, stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *stops, layers))) for stops in inner]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (3, 4), (4, 9)])
def test_all_balances_of_drawn_layers_simulated(stages: int, micro_batches: int) -> None:
    rng = random.Random(stages)
    for _ in range(5):
        forward, backward = ([rng.choice([0.0, 1.0, rng.random()]) + 0.01 for _ in range(7)] for _ in range(2))
        least = least_flush([f + b for f, b in zip(forward, backward, strict=True)], stages, micro_batches)
        sums, spans = [], []
        for balance in balances(7, stages):
            runs = cuts(balance)
            times = ChunkTimes(*([sum(part[a:b]) for a, b in runs] for part in (forward, backward)))
            loads = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
            before = (0.0, *accumulate(loads))
            sums.append(max(before[k] + micro_batches * load for k, load in enumerate(loads)))
            pipeline = ChunkMap(tuple(range(stages)), tuple(Route(k, k + 1, k + 1) for k in range(stages - 1)))
            for schedule in ("1f1b", "gpipe"):
                actions = program(schedule, pipeline, micro_batches, times)
                spans.append(simulate(actions, times.forward, times.backward).makespan)
        assert least == pytest.approx(min(sums), rel=1e-6)
        assert least <= min(spans) * (1 + 1e-9)
