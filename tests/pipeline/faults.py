"""Faults of a schedule's program: the oracle of the tests of schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tiledseg.pipeline.schedule import (
    Action,
    Backward,
    ChunkMap,
    Forward,
    MessageEnd,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    with_messages,
)
from tiledseg.pipeline.simulation import Placed, in_flight, replay, words_of


def faults(program: Program, pipeline: ChunkMap, micro_batches: int, most_in_flight: Sequence[int] = ()) -> list[str]:
    """Every fault, one line each; empty where the program is sound.

    Sound: each chunk computes each micro-batch forward and then backward, once, on its rank; whatever it needs has
    been made or received before; every message has two ends, once each; no rank waits forever; and no chunk holds
    more micro-batches than `most_in_flight` says, where it is given.
    """
    found = _count_faults(program, pipeline, micro_batches)
    for rank, actions in enumerate(program):
        found += _order_faults(rank, actions, pipeline)
    _, stuck = replay(program)
    found += [f"rank {rank} waits forever at: {words_of(action)}" for rank, action in stuck]
    for chunk, most in enumerate(most_in_flight):
        held = in_flight(program, len(pipeline.ranks))[chunk]
        if held > most:
            found.append(f"chunk {chunk} holds {held} micro-batches at once, but at most {most} are allowed")
    return found


def _count_faults(program: Program, pipeline: ChunkMap, micro_batches: int) -> list[str]:
    """Each chunk goes forward and backward with each micro-batch once, on its rank; each message has its two ends."""
    wanted: set[Placed] = set()
    for rank in range(pipeline.size):
        own = [chunk for chunk, place in enumerate(pipeline.ranks) if place == rank]
        passes = [kind(m, chunk) for m in range(micro_batches) for chunk in own for kind in (Forward, Backward)]
        wanted |= {(rank, action) for action in with_messages(passes, pipeline)}
    done = Counter((rank, action) for rank, actions in enumerate(program) for action in actions)
    found = [f"rank {rank} lacks the {words_of(action)}" for rank, action in sorted(wanted - set(done), key=_key)]
    found += [f"rank {rank} has a needless {words_of(action)}" for rank, action in sorted(set(done) - wanted, key=_key)]
    repeated = sorted((placed for placed, times in done.items() if times > 1), key=_key)
    return found + [f"rank {rank} has {done[rank, action]} times the {words_of(action)}" for rank, action in repeated]


def _order_faults(rank: int, actions: Sequence[Action], pipeline: ChunkMap) -> list[str]:
    """Whatever an action needs stands before it."""
    found, before = [], set[Action]()
    for action in actions:
        lacking = [need for need in _needs(action, pipeline) if need not in before]
        found += [f"rank {rank} does '{words_of(action)}' before '{words_of(need)}'" for need in lacking]
        before.add(action)
    return found


def _needs(action: Action, pipeline: ChunkMap) -> list[Action]:
    """What a rank must have done before an action."""
    m, ranks = action.micro_batch, pipeline.ranks
    needs: list[Action] = []
    if isinstance(action, SendActivation):
        return [Forward(m, action.route.source)]
    if isinstance(action, SendGradient):
        return [Backward(m, action.route.target)]
    if isinstance(action, MessageEnd):
        return []
    for route in pipeline.routes:
        local = pipeline.is_local(route)
        if isinstance(action, Forward) and route.target == action.chunk:
            needs.append(Forward(m, route.source) if local else ReceiveActivation(m, route, ranks[route.source]))
        if isinstance(action, Backward) and route.source == action.chunk and route.returns:
            needs.append(Backward(m, route.target) if local else ReceiveGradient(m, route, ranks[route.target]))
    return [Forward(m, action.chunk), *needs] if isinstance(action, Backward) else needs


def _key(placed: Placed) -> tuple[int, int, str]:
    return placed[0], placed[1].micro_batch, words_of(placed[1])
