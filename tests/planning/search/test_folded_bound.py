"""No balance of a folded pipeline is quicker than the least that is said of all."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.planning.search.test_best import question
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import chunk_ranks
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.chunk_orders import ChunkTimes, fastest, makespan, pass_times
from tiledseg.planning.run.question import Extent
from tiledseg.planning.search.best import search
from tiledseg.planning.search.candidate import Candidate
from tiledseg.planning.search.folded_bound import least_folded_flush
from tiledseg.planning.search.price import Discarded, Priced, Pricing
from tiledseg.planning.search.scaling import strong

LAYERS = 9
SKIPS = ((0, 7), (2, 5))


def legal(ranks: int) -> list[tuple[int, ...]]:
    """Each balance that keeps the skips on their ranks."""
    placed = chunk_ranks("folded", ranks)
    inner = itertools.combinations(range(1, LAYERS), len(placed) - 1)
    found = [tuple(b - a for a, b in itertools.pairwise((0, *stops, LAYERS))) for stops in inner]
    owners = [[rank for rank, count in zip(placed, each, strict=True) for _ in range(count)] for each in found]
    return [each for each, own in zip(found, owners, strict=True) if all(own[a] == own[b] for a, b in SKIPS)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 5), (3, 1), (3, 4), (4, 9)])
def test_all_folded_balances_of_drawn_layers_simulated(ranks: int, micro_batches: int) -> None:
    rng, placed = random.Random(ranks), chunk_ranks("folded", ranks)
    for _ in range(5):
        forward, backward = ([rng.choice([1.0, rng.random()]) + 0.01 for _ in range(LAYERS)] for _ in range(2))
        layers = [f + b for f, b in zip(forward, backward, strict=True)]
        sums, spans = {}, []
        for balance in legal(ranks):
            runs = cuts(balance)
            times = ChunkTimes(*([sum(part[a:b]) for a, b in runs] for part in (forward, backward)))
            loads = [sum(layers[a:b]) for a, b in runs]
            own = [sum(load for load, at in zip(loads, placed, strict=True) if at == rank) for rank in range(ranks)]
            longest = max(sum(loads[:rank]) + micro_batches * work for rank, work in enumerate(own))
            sums[balance] = max(longest, sum(layers))
            spans.append(makespan(fastest(placed, micro_batches, times), pass_times(placed, times)))
        found = least_folded_flush(layers, SKIPS, ranks, micro_batches)
        assert found is not None
        least, balance = found
        assert least == pytest.approx(min(sums.values()))
        assert sums[balance] == pytest.approx(least)
        assert least <= min(spans) * (1 + 1e-9)


def test_no_cuts_keep_skips_that_cross() -> None:
    assert least_folded_flush([1.0] * 6, ((0, 3), (1, 5)), 3, 2) is None
    assert least_folded_flush([1.0] * 6, (), 1, 2) is None


def test_few_settings_of_many_need_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound of folded pipelines 44 of this search had a plan, and 78 of this study of scaling, which looked
    for the best of another kind too."""
    planned: list[Candidate] = []
    price = Pricing.price

    def counted(self: Pricing, candidate: Candidate) -> Priced | Discarded:
        planned.append(candidate)
        return price(self, candidate)

    monkeypatch.setattr(Pricing, "price", counted)
    asked = question(16, network=UNet(3, 1, base_channels=16), rasters=(Extent((2048, 2048)),))
    search(asked, 4)
    assert len(planned) <= 30
    planned.clear()
    strong(asked, (16, 32), 4)
    assert len(planned) <= 33
