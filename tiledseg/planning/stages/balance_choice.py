"""The automatic balance of a pipeline: the cuts of the shortest simulated step that is found.

The search starts from the cuts that no others undercut in the time of the slowest stage (`pipeline.balance`, exact),
and from those that may be somewhat slower where that saves bytes. That time decides how often a micro-batch leaves;
filling, draining and waiting for messages depend on the other stages too. So cuts of the best few of them are shifted,
one or two at a time, as long as the step gets shorter. The same question has the same answer everywhere.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, cycle, pairwise, product

from tiledseg.pipeline.balance import TOLERANCES, StagePrices, choose_balances, choose_folded_balances
from tiledseg.pipeline.chunk_orders import OrderRule, best_rule, makespan, pass_times, urgent_first
from tiledseg.planning.stages.staged_pipeline import PipelineCase, StagedPipeline, stage, torn_skips

_SAMPLE = 24  # micro-batches that are simulated; each more takes as long as the slowest stage
_STARTS = 3
_TRIES = 150  # simulated steps for each start
_GAIN = 1e-6  # the least that a shift has to save, as a share

Balance = tuple[int, ...]
Shifts = tuple[tuple[int, int], ...]  # of cuts: each by how many places


def choose(case: PipelineCase) -> StagedPipeline:
    """The pipeline of the automatic balance. Raises ConfigError where none fits the network or the limit."""
    sample = replace(case, micro_batches=min(case.micro_batches, _SAMPLE))

    @functools.cache
    def step_time(balance: Balance) -> float:
        return _step_time(case, stage(sample, balance), None)

    tolerances = TOLERANCES if case.message else TOLERANCES[:1]  # the fastest alone, where messages take no time
    starts = sorted(_balances(case, tolerances), key=step_time)[:_STARTS]
    return stage(case, min([*starts, *(_improved(case, sample, balance) for balance in starts)], key=step_time))


def first(case: PipelineCase) -> StagedPipeline:
    """The pipeline of the fastest slowest stage, which `choose` begins with. Raises ConfigError as that."""
    return stage(case, _balances(case, TOLERANCES[:1])[0])


def _improved(case: PipelineCase, sample: PipelineCase, start: Balance) -> Balance:
    """Where shifted cuts lead to from `start`, while each makes the step shorter."""
    places, choices = _places(case, start), _shifts(case)
    rule = None
    if len(case.ranks) > case.stages:  # one rule for all orders: to try all on each balance takes 30 times as long
        rule = best_rule(pass_times(case.ranks, stage(sample, start).times), sample.micro_batches)
    best, least = start, _step_time(case, stage(sample, start), rule)
    tries = idle = 0
    for shifts in cycle(choices):
        if tries == _TRIES or idle == len(choices):
            break
        idle += 1
        balance = _apply(best, shifts, places)
        if balance is None or not _fits(case, balance):
            continue
        tries += 1
        time = _step_time(case, stage(sample, balance), rule)
        if time < (1 - _GAIN) * least:
            best, least, idle = balance, time, 0
    return best


def _step_time(case: PipelineCase, staged: StagedPipeline, rule: OrderRule | None) -> float:
    """Of all micro-batches of `case`, of which `staged` has some; `rule`: of the order of ranks with several chunks."""
    more = case.micro_batches - staged.case.micro_batches
    rest = more * staged.period if more else 0.0
    if rule is None:
        return staged.timeline().makespan + rest
    given = pass_times(case.ranks, staged.times)
    return makespan(urgent_first(given, staged.case.micro_batches, *rule), given) + rest


def _places(case: PipelineCase, start: Balance) -> list[int]:
    """Before which nodes to cut: those that take time, make a skip or take one, and where `start` has its cuts."""
    ends = {layer for pair in case.prices.skips for layer in pair}
    timed = {i for i, times in enumerate(zip(case.forward, case.backward, strict=True)) if sum(times) > 0}
    return sorted({*ends, *timed, *accumulate(start[:-1])} - {0})


def _shifts(case: PipelineCase) -> list[Shifts]:
    """Cuts by number, and by how many places each is shifted: one or two neighbours; folded, those around a rank."""
    last = len(case.ranks) - 2
    if case.folds:
        pairs = [pair for pair in product((-2, -1, 0, 1, 2), repeat=2) if any(pair)]
        return [((i, a), (last - i, b)) for i in range(case.stages - 1) for a, b in pairs]
    single = [((i, by),) for i in range(last + 1) for by in (-1, 1, -2, 2)]
    return [*single, *(((i, by), (i + 1, by)) for i in range(last) for by in (-1, 1))]


def _apply(balance: Balance, shifts: Shifts, places: Sequence[int]) -> Balance | None:
    """The balance whose cuts are shifted; None where there is no such place, or a stage is left without layers."""
    at = [bisect_left(places, cut) for cut in accumulate(balance[:-1])]
    for cut, by in shifts:
        at[cut] += by
    if at[0] < 0 or at[-1] >= len(places) or any(a >= b for a, b in pairwise(at)):
        return None
    stops = [0, *(places[i] for i in at), sum(balance)]
    return tuple(b - a for a, b in pairwise(stops))


def _fits(case: PipelineCase, balance: Balance) -> bool:
    """True if a balance keeps to the limit, and a folded one its skips on their ranks."""
    return not torn_skips(case, balance) and (case.limit is None or max(case.rank_bytes(balance)) <= case.limit)


def _balances(case: PipelineCase, tolerances: Sequence[float]) -> list[Balance]:
    """Of the fastest slowest stage, for several prices of a byte."""
    both = [f + b for f, b in zip(case.forward, case.backward, strict=True)]
    recomputing = frozenset(chunk for chunk, rank in enumerate(case.ranks) if case.recomputes(rank))
    traffic = case.prices.handed_on if case.folds else case.prices.received
    prices = StagePrices(both, case.memory(), case.limit, traffic, case.forward, recomputing)
    if case.folds:
        found = choose_folded_balances(prices, case.prices.skips, case.stages, tolerances)
    else:
        found = choose_balances(prices, len(case.ranks), tolerances)
    return list(dict.fromkeys(found))
