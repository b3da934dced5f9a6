"""Balances: the numbers of consecutive layers of the stages. Plain numbers in, plain numbers out.

A stage takes the sum of its layers' times, and a pipeline the time of its slowest stage. `choose_balances` finds a
fastest partition by dynamic programming over the cuts: exact, since the cost of a stage depends only on its two cuts.
Among equally fast partitions it chooses the one whose stages receive the fewest bytes.

A folded pipeline of n ranks has 2n - 1 chunks. Chunk r of the way down and chunk 2n - 2 - r of the way up share rank r;
the innermost chunk is alone on the last rank. A cut is then a pair, one on each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from tiledseg.errors import BudgetError, ConfigError
from tiledseg.units import size

# Tolerances to try if transfers take time: the share by which the slowest stage may exceed that of the fastest cut.
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)

Memory = Callable[[int, int, int], int]  # first layer, stop (half-open), chunk -> bytes while in flight
ReceivedBytes = Callable[[int, int], int]  # first layer, stop -> bytes that the chunk receives from others
Middle = tuple[int, int]  # the layers that no stage has taken yet: first layer, stop
ChunkRun = tuple[int, int, int]  # first layer, stop, chunk
Paths = dict[Middle, tuple[float, list[Middle]]]  # to each middle: its cost (load or bytes), and the path
Runs = Callable[[Middle, Middle, int], tuple[ChunkRun, ...]]  # the runs of a stage between two middles


@dataclass(frozen=True)
class BalancePrices:
    """The costs of runs of layers on a stage.

    `times`: time of each layer in any unit, forward and backward; `again`: time of its second forward pass, in chunks
    of `recomputing`. `limit`: bytes that a stage may need.
    """

    times: Sequence[float]
    memory: Memory | None = None
    limit: int | None = None
    traffic: ReceivedBytes | None = None
    again: Sequence[float] = ()
    recomputing: frozenset[int] = frozenset()

    @cached_property
    def _starts(self) -> tuple[float, ...]:
        """The time of all layers before each."""
        return (0, *accumulate(self.times))

    @cached_property
    def _recomputing_starts(self) -> tuple[float, ...]:
        return (0, *accumulate(time + more for time, more in zip(self.times, self.again, strict=True)))

    def load(self, runs: Sequence[ChunkRun]) -> float:
        load = 0.0
        for first, stop, chunk in runs:
            starts = self._recomputing_starts if chunk in self.recomputing else self._starts
            load += starts[stop] - starts[first]
        return load

    def bytes(self, runs: Sequence[ChunkRun]) -> int:
        return 0 if self.memory is None else sum(self.memory(*run) for run in runs)

    def fits(self, runs: Sequence[ChunkRun]) -> bool:
        return self.limit is None or self.bytes(runs) <= self.limit

    def received(self, runs: Sequence[ChunkRun]) -> int:
        return 0 if self.traffic is None else sum(self.traffic(first, stop) for first, stop, _ in runs)

    def check(self, chunks: int, stages: int) -> None:
        """Raise ConfigError for more chunks than layers."""
        if not 1 <= chunks <= len(self.times):
            need = f" (folded: {chunks} chunks)" if chunks > stages else ""
            raise ConfigError(
                f"{stages} stages{need} cannot share {len(self.times)} layers; give each at least 1 layer: fewer stages"
            )


def parse_balance(values: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the balance. Raises ConfigError if the counts do not sum to `layers`."""
    if sum(values) != layers:
        raise ConfigError(
            f"the balance [{','.join(map(str, values))}] sums to {sum(values)} layers, but the network has {layers}; "
            f"give counts that sum to {layers}, or auto"
        )
    return tuple(values)


def cuts(balance: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the layers of each stage as (first, stop), half-open."""
    stops = tuple(accumulate(balance))
    return tuple(zip((0, *stops[:-1]), stops, strict=True))


def choose_balances(prices: BalancePrices, stages: int, tolerances: Sequence[float] = (0.0,)) -> list[tuple[int, ...]]:
    """Return, for each tolerance, the balance with the fastest slowest stage among those that fit the memory.

    Ties: the least traffic of all stages together. A tolerance is the share by which the slowest stage may be slower if
    that saves traffic. Raises ConfigError for more stages than layers, BudgetError with the stage if nothing fits.
    """
    prices.check(stages, stages)
    layers = len(prices.times)
    levels: list[list[Middle]] = [
        [(stop, layers) for stop in range(stage + 1, layers - stages + stage + 2)] for stage in range(stages - 1)
    ]

    def runs_of(before: Middle, after: Middle, stage: int) -> tuple[ChunkRun, ...]:
        return ((before[0], after[0], stage),) if before[0] < after[0] else ()

    paths = _paths(prices, [[(0, layers)], *levels, [(layers, layers)]], runs_of, tolerances)
    return [tuple(after[0] - before[0] for before, after in pairwise(path)) for path in paths]


def choose_folded_balances(
    prices: BalancePrices, skips: Sequence[tuple[int, int]], ranks: int, tolerances: Sequence[float] = (0.0,)
) -> list[tuple[int, ...]]:
    """Return the folded balances of 2 * ranks - 1 chunks with the fastest slowest rank; no skip leaves its rank.

    `skips`: the producing and the reading layer of each skip. Cuts are tried before these, and before layers that take
    time: any other cut gives the same times, and all skips the same ranks. The rest as for `choose_balances`. Raises
    ConfigError for more chunks than layers, or if no cut keeps the skips on one rank; BudgetError if nothing fits.
    """
    times, chunks = prices.times, 2 * ranks - 1
    prices.check(chunks, ranks)
    layers = len(times)
    ends = {layer for skip in skips for layer in skip}
    places = [layer for layer in range(1, layers) if times[layer] > 0 or layer in ends]
    pairs = [(a, b) for a in places for b in places if a < b and all((s < a) == (p >= b) for s, p in skips)]

    def runs_of(before: Middle, after: Middle, rank: int) -> tuple[ChunkRun, ...]:
        if rank == ranks - 1:
            return ((*before, rank),)
        if before[0] < after[0] and after[1] < before[1]:
            return (before[0], after[0], rank), (after[1], before[1], chunks - 1 - rank)
        return ()

    levels = [[(0, layers)], *([pairs] * (ranks - 1)), [(0, 0)]]
    found = []
    for path in _paths(prices, levels, runs_of, tolerances):
        ways = [(after[0] - before[0], before[1] - after[1]) for before, after in pairwise(path[:-1])]
        down, up = [way[0] for way in ways], [way[1] for way in ways]
        found.append((*down, path[-2][1] - path[-2][0], *reversed(up)))
    return found


def _paths(
    prices: BalancePrices, levels: Sequence[Sequence[Middle]], runs_of: Runs, tolerances: Sequence[float]
) -> list[list[Middle]]:
    """Return, for each tolerance, the path through the levels (a step a stage) with the smallest greatest load, then
    the least traffic. `runs_of`: the runs of a stage on its step."""

    def walk(levels: Sequence[Sequence[Middle]], most: float | None) -> list[Paths]:
        """Return, for each level, the cost and path to each middle: the smallest greatest load, or with `most` the
        fewest bytes among paths on which no stage's load exceeds it."""
        every: list[Paths] = [{start: (0, [start]) for start in levels[0]}]
        for stage, level in enumerate(levels[1:]):
            paths = every[-1]
            reached: Paths = {}
            for after in level:
                best = math.inf
                for before in reversed(paths):
                    cost, path = paths[before]
                    if cost >= best:
                        continue  # the step can only add to it
                    taken = runs_of(before, after, stage)
                    load = prices.load(taken)
                    too_long = load >= best if most is None else load > most
                    if not taken or too_long or not prices.fits(taken):
                        continue
                    cost = max(cost, load) if most is None else cost + prices.received(taken)
                    if cost < best:
                        best, reached[after] = cost, (cost, [*path, after])
            if not reached:
                steps = (runs_of(before, after, stage) for after in level for before in paths)
                needs = [prices.bytes(taken) for taken in steps if taken]
                if not needs:
                    raise ConfigError(
                        f"no cut in front of stage {stage} keeps each skip on one rank; give fewer stages, or another "
                        "schedule"
                    )
                raise BudgetError(
                    f"stage {stage} needs at least {size(min(needs))}, but the memory of a stage is "
                    f"{size(prices.limit or 0)}; give more stages, smaller tiles, fewer micro-batches in flight, or a "
                    "device with more memory"
                )
            every.append(reached)
        return every

    quickest = walk(levels, None)
    ((least, _),) = quickest[-1].values()
    found = []
    for most in ((1 + share) * least for share in tolerances):
        within = [[place for place, (load, _) in level.items() if load <= most] for level in quickest]
        ((_, path),) = walk(within, most)[-1].values()
        found.append(path)
    return found
