"""The program of a pipeline that only goes forward: for validation and prediction. Plain values, nothing is run.

Each rank takes the micro-batches one after the other. A folded pipeline's rank has two chunks: it starts as many
micro-batches as fit on the way down and back before the first returns, then does a chunk of the way down and its mirror
in turn, so no rank waits in the steady state.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiledseg.pipeline.schedule import Forward, Pipeline, Program, with_messages


def forward_program(pipeline: Pipeline, micro_batches: int) -> Program:
    """The actions of every rank; no backward passes, no gradients."""
    return tuple(
        tuple(with_messages(list(_order(pipeline, rank, micro_batches)), pipeline)) for rank in range(pipeline.size)
    )


def _order(pipeline: Pipeline, rank: int, micro_batches: int) -> Iterator[Forward]:
    chunks = [chunk for chunk, place in enumerate(pipeline.ranks) if place == rank]
    ahead = min(pipeline.size - 1 - rank, micro_batches) if len(chunks) > 1 else 0
    for m in range(ahead):
        yield Forward(m, chunks[0])
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Forward(m + ahead, chunks[0])
        for chunk in chunks[1:]:
            yield Forward(m, chunk)
