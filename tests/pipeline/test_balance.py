"""Balances against all balances."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.pipeline.balance import BalancePrices, choose_balances, choose_folded_balances, cuts, parse_balance

law = settings(derandomize=True, max_examples=60, deadline=None)
TIMES = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def every_balance(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All balances of positive counts."""
    stops = [(0, *chosen, layers) for chosen in combinations(range(1, layers), stages - 1)]
    return [tuple(b - a for a, b in pairwise(s)) for s in stops]


def slowest(times: list[int], balance: tuple[int, ...]) -> int:
    return max(sum(times[a:b]) for a, b in cuts(balance))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((14, 24), ["sums to 38", "has 109", "auto"]),
        ((), ["[]", "sums to 0", "109"]),
    ],
)
def test_a_wrong_balance_names_both_values(values: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_balance(values, 109)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@law
@given(TIMES, st.data())
def test_under_a_limit_that_depends_on_the_stage_and_with_the_least_traffic(
    times: list[int], data: st.DataObject
) -> None:
    layers = len(times)
    stages = data.draw(st.integers(1, layers))
    kept = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    edges = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    limit = data.draw(st.integers(0, 40))

    def memory(first: int, stop: int, stage: int) -> int:
        return sum(kept[first:stop]) * (stages - stage)

    def traffic(first: int, stop: int) -> int:
        return edges[first] if first else 0

    def fits(balance: tuple[int, ...]) -> bool:
        return all(memory(a, b, stage) <= limit for stage, (a, b) in enumerate(cuts(balance)))

    def price(balance: tuple[int, ...]) -> tuple[int, int]:
        return slowest(times, balance), sum(traffic(a, b) for a, b in cuts(balance))

    possible = [price(b) for b in every_balance(layers, stages) if fits(b)]
    if not possible:
        with pytest.raises(ConfigError, match=rf"stage \d needs at least \d+ B, .* is {limit} B;"):
            choose_balances(BalancePrices(times, memory, limit, traffic), stages)[0]
        return
    chosen = choose_balances(BalancePrices(times, memory, limit, traffic), stages)[0]
    assert fits(chosen)
    assert price(chosen) == min(possible)
    tolerance = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    thrifty = choose_balances(BalancePrices(times, memory, limit, traffic), stages, (tolerance,))[0]
    allowed = (1 + tolerance) * min(possible)[0]
    assert fits(thrifty)
    assert price(thrifty)[0] <= allowed
    assert price(thrifty)[1] == min(sent for time, sent in possible if time <= allowed)


@law
@given(st.integers(0, 3), st.integers(1, 3), st.data())
def test_folded_keeps_skips_on_their_rank_and_is_fastest(depth: int, ranks: int, data: st.DataObject) -> None:
    """Drawn U-shaped sequences: layers down to the bottom, a skip from each level to its mirror."""
    down = [data.draw(st.integers(1, 2)) for _ in range(depth)]
    up = [data.draw(st.integers(1, 2)) for _ in range(depth)]
    bottom = data.draw(st.integers(1, 3))
    layers = sum(down) + bottom + sum(up)
    times = data.draw(st.lists(st.integers(1, 5), min_size=layers, max_size=layers))
    skips = [(sum(down[: i + 1]) - 1, sum(down) + bottom + sum(up[: depth - 1 - i])) for i in range(depth)]
    chunks = 2 * ranks - 1

    def load(balance: tuple[int, ...]) -> int:
        parts = [sum(times[a:b]) for a, b in cuts(balance)]
        return max(parts[r] + (parts[-1 - r] if r < ranks - 1 else 0) for r in range(ranks))

    def together(balance: tuple[int, ...]) -> bool:
        chunk = [c for c, count in enumerate(balance) for _ in range(count)]
        return all(min(chunk[s], chunks - 1 - chunk[s]) == min(chunk[p], chunks - 1 - chunk[p]) for s, p in skips)

    possible = [load(b) for b in every_balance(layers, chunks) if together(b)] if chunks <= layers else []
    if not possible:
        with pytest.raises(ConfigError, match=r"cannot share|keeps each skip"):
            choose_folded_balances(BalancePrices(times), skips, ranks)[0]
        return
    chosen = choose_folded_balances(BalancePrices(times), skips, ranks)[0]
    assert parse_balance(chosen, layers) == chosen
    assert together(chosen)
    assert load(chosen) == min(possible)


def test_folded_under_a_limit() -> None:
    def memory(first: int, stop: int, chunk: int) -> int:
        return stop - first

    assert choose_folded_balances(BalancePrices([1, 1, 1, 1, 5, 1]), [(0, 5)], 2)[0] == (4, 1, 1)
    assert choose_folded_balances(BalancePrices([1, 1, 1, 1, 5, 1], memory, 4), [(0, 5)], 2)[0] == (3, 2, 1), (
        "4 layers on rank 0, not 5"
    )
    with pytest.raises(ConfigError, match="stage 0 needs at least 2 B, but the memory of a stage is 1 B;"):
        choose_folded_balances(BalancePrices([1, 1, 1, 1, 5, 1], memory, 1), [(0, 5)], 2)[0]
    with pytest.raises(ConfigError, match="4 stages cannot share 3 layers"):
        choose_balances(BalancePrices([1, 2, 3]), 4)[0]
    with pytest.raises(ConfigError, match="no cut in front of stage 0"):
        choose_folded_balances(BalancePrices([1, 1, 1]), [(0, 1), (1, 2)], 2)[0]


@law
@given(TIMES, st.data())
def test_chunks_that_recompute_pay_for_it(times: list[int], data: st.DataObject) -> None:
    """The fastest of all balances, where only some of the stages go forward twice; folded too."""
    stages = data.draw(st.integers(1, len(times)))
    more = data.draw(st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times)))
    modes = data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages))

    def loads(balance: tuple[int, ...], ranks: tuple[int, ...]) -> int:
        found = [0] * stages
        for rank, (a, b) in zip(ranks, cuts(balance), strict=True):
            found[rank] += sum(times[a:b]) + modes[rank] * sum(more[a:b])
        return max(found)

    for schedule, chunks in (("1f1b", stages), ("folded", 2 * stages - 1)):
        if chunks > len(times):
            continue
        ranks = chunk_ranks(schedule, stages)
        twice = frozenset(c for c, rank in enumerate(ranks) if modes[rank])
        prices = BalancePrices(times, again=more, recomputing=twice)
        best = min(loads(balance, ranks) for balance in every_balance(len(times), chunks))
        if schedule == "1f1b":
            chosen = choose_balances(prices, stages)[0]
            assert loads(chosen, ranks) == best
        elif all(times):  # cuts in front of layers that take no time are not tried
            chosen = choose_folded_balances(prices, [], stages)[0]
            assert loads(chosen, ranks) == best
