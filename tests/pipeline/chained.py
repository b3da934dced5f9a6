"""Pipelines of no network, whose chunks send each what they make to the next; and the faults of their programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tiledseg.pipeline.schedule import ChunkMap, ChunkPass, MessageEnd, Program, Route, StageTurn
from tiledseg.pipeline.simulation import in_flight, replay

FIRST_SKIP = 1000  # the number of the tensor; smaller ones go from chunk to chunk


def chained(ranks: Sequence[int], skips: Sequence[tuple[int, int]] = ()) -> ChunkMap:
    """`skips`: pairs of chunks; one within a chunk sends nothing."""
    links = (Route(chunk, chunk + 1, chunk + 1) for chunk in range(len(ranks) - 1))
    over = (Route(source, target, FIRST_SKIP + n) for n, (source, target) in enumerate(skips) if source != target)
    return ChunkMap(tuple(ranks), (*links, *over))


def flat(turns: Iterable[StageTurn]) -> list[ChunkPass | MessageEnd]:
    """All that a rank does, in order."""
    return [action for turn in turns for action in (*turn.receives, turn.compute, *turn.sends)]


def is_sound(program: Program, pipeline: ChunkMap, micro_batches: int, most_in_flight: Sequence[int] = ()) -> bool:
    """Each pass is done once, on its rank, after all that it needs; each message has two ends, around its passes; no
    rank waits forever; no chunk holds more micro-batches than `most_in_flight` says, where it is given."""
    order, stuck = replay(program)
    place = {(rank, action): at for at, (rank, turn) in enumerate(order) for action in flat([turn])}
    ranks, wanted, pairs = pipeline.ranks, set(), []
    for m in range(micro_batches):
        for chunk, rank in enumerate(ranks):
            wanted |= {(rank, ChunkPass(m, chunk)), (rank, ChunkPass(m, chunk, True))}
            pairs.append(((rank, ChunkPass(m, chunk)), (rank, ChunkPass(m, chunk, True))))
        for route in pipeline.routes:
            for back in (False, True)[: 1 + route.returns]:
                maker, taker = (route.target, route.source) if back else (route.source, route.target)
                way = [(ranks[maker], ChunkPass(m, maker, back)), (ranks[taker], ChunkPass(m, taker, back))]
                if not pipeline.is_local(route):
                    send = MessageEnd(m, route, ranks[taker], back)
                    way[1:1] = [(ranks[maker], send), (ranks[taker], send.other_end(ranks[maker]))]
                    wanted |= set(way)
                pairs += pairwise(way)
    done = Counter((rank, action) for rank, turns in enumerate(program) for action in flat(turns))
    if stuck or done != Counter(wanted) or any(place[one] > place[other] for one, other in pairs):
        return False
    held = in_flight(program, len(ranks))
    return all(own <= most for own, most in zip(held, most_in_flight, strict=False))
