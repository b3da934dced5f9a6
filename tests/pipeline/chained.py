"""Pipelines of no network, whose chunks send each what they make to the next; and the faults of their orders."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.pipeline.schedule import ChunkMap, ChunkPass, Orders, Route
from tiledseg.pipeline.simulation import simulate

FIRST_SKIP = 1000  # the number of the tensor; smaller ones go from chunk to chunk


def chained(ranks: Sequence[int], skips: Sequence[tuple[int, int]] = ()) -> ChunkMap:
    """`skips`: pairs of chunks; one within a chunk sends nothing."""
    links = (Route(chunk, chunk + 1, chunk + 1) for chunk in range(len(ranks) - 1))
    over = (Route(source, target, FIRST_SKIP + n) for n, (source, target) in enumerate(skips) if source != target)
    return ChunkMap(tuple(ranks), (*links, *over))


def is_sound(orders: Orders, pipeline: ChunkMap, micro_batches: int, most_in_flight: Sequence[int] = ()) -> bool:
    """Each pass is done once, on its rank, a backward pass after the forward one; no rank waits forever; no chunk holds
    more micro-batches than `most_in_flight` says, where it is given."""
    for rank, order in enumerate(orders):
        own = [chunk for chunk, place in enumerate(pipeline.ranks) if place == rank]
        wanted = [ChunkPass(m, chunk, back) for m in range(micro_batches) for chunk in own for back in (False, True)]
        if sorted(order) != sorted(wanted) or any(
            order.index(each) < order.index(each._replace(backward=False)) for each in order
        ):
            return False
    chunks = len(pipeline.ranks)
    held = simulate(orders, pipeline, [1] * chunks, [1] * chunks).in_flight(chunks)
    return all(own <= most for own, most in zip(held, most_in_flight, strict=False))
