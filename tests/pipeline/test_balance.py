"""Balances against all balances."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.pipeline.balance import BalancePrices, choose_balances, choose_folded_balances, cuts, parse_balance

law = settings(derandomize=True, max_examples=400, deadline=None)


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
@given(st.sampled_from(["1f1b", "folded"]), st.integers(1, 5), st.data())
def test_a_balance_is_the_best_of_all(schedule: str, stages: int, data: st.DataObject) -> None:
    """Of those whose stages fit the memory, and in `folded` keep the skips of a U on their rank: the fastest, or one
    that is slower by the tolerance at most, with the least traffic. Some stages go forward twice."""
    stages = min(stages, 3) if schedule == "folded" else stages
    depth = data.draw(st.integers(0, 3))
    down, up = ([data.draw(st.integers(1, 2)) for _ in range(depth)] for _ in range(2))
    bottom = data.draw(st.integers(1, 3))
    layers = sum(down) + bottom + sum(up)
    is_folded, ranks = schedule == "folded", chunk_ranks(schedule, stages)
    skips = [(sum(down[: i + 1]) - 1, sum(down) + bottom + sum(up[: depth - 1 - i])) for i in range(depth)]

    def numbers(least: int = 0) -> list[int]:
        return data.draw(st.lists(st.integers(least, 9), min_size=layers, max_size=layers))

    # Cuts of a fold in front of layers that take no time are not tried.
    times, again, kept, edges = numbers(least=is_folded), numbers(), numbers(), numbers()
    twice = data.draw(st.frozensets(st.integers(0, stages - 1)))
    limit = data.draw(st.one_of(st.just(10**9), st.integers(5, 150)))

    def memory(first: int, stop: int, chunk: int) -> int:
        return sum(kept[first:stop]) * (len(ranks) - chunk)

    def price(balance: tuple[int, ...]) -> tuple[float, int]:
        """Return the slowest stage's load and the traffic; an endless load if the balance cannot be."""
        loads, needed, chunk_of = (
            [0] * stages,
            [0] * stages,
            [c for c, count in enumerate(balance) for _ in range(count)],
        )
        for chunk, (first, stop) in enumerate(cuts(balance)):
            loads[ranks[chunk]] += sum(times[first:stop]) + (ranks[chunk] in twice) * sum(again[first:stop])
            needed[ranks[chunk]] += memory(first, stop, chunk)
        apart = is_folded and any(ranks[chunk_of[s]] != ranks[chunk_of[p]] for s, p in skips)
        cannot = apart or max(needed) > limit
        return math.inf if cannot else max(loads), sum(edges[first] for first, _ in cuts(balance) if first)

    stops = ((0, *chosen, layers) for chosen in combinations(range(1, layers), len(ranks) - 1))
    possible = [price(tuple(b - a for a, b in pairwise(each))) for each in stops]
    fastest = min(possible, default=(math.inf, 0))
    more = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    recomputing = frozenset(chunk for chunk, rank in enumerate(ranks) if rank in twice)
    prices = BalancePrices(times, memory, limit, lambda first, _: edges[first] if first else 0, again, recomputing)

    def chosen() -> list[tuple[int, ...]]:
        how = (0.0, more)
        return choose_folded_balances(prices, skips, stages, how) if is_folded else choose_balances(prices, stages, how)

    if fastest[0] == math.inf:
        with pytest.raises(
            ConfigError, match=r"cannot share|keeps each skip|stage \d needs at least \d+ B, .* is \d+ B;"
        ):
            chosen()
        return
    best, thrifty = chosen()
    assert parse_balance(best, layers) == best
    assert price(best) == fastest
    allowed = (1 + more) * fastest[0]
    assert price(thrifty)[0] <= allowed
    assert price(thrifty)[1] == min(sent for load, sent in possible if load <= allowed)


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
