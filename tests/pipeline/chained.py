"""Pipelines whose chunks send each what they make to the next, with skips besides; of no network."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.pipeline.schedule import ChunkMap, Route

FIRST_SKIP = 1000  # the number of the tensor; smaller ones go from chunk to chunk


def chained(ranks: Sequence[int], skips: Sequence[tuple[int, int]] = ()) -> ChunkMap:
    """`skips`: pairs of chunks; one within a chunk sends nothing."""
    links = (Route(chunk, chunk + 1, chunk + 1) for chunk in range(len(ranks) - 1))
    over = (Route(source, target, FIRST_SKIP + n) for n, (source, target) in enumerate(skips) if source != target)
    return ChunkMap(tuple(ranks), (*links, *over))
