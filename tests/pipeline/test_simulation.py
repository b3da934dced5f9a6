"""Faults are found, all of them; times follow the model; drawings say what they draw."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.pipeline.chained import FIRST_SKIP, chained, is_sound
from tiledseg.pipeline.schedule import ChunkPass, program
from tiledseg.pipeline.simulation import simulate

law = settings(derandomize=True, max_examples=40, deadline=None)
TWO = chained((0, 1))


def test_faults_are_found() -> None:
    """A send that is missing, a micro-batch too many, and two ranks that wait for each other."""
    made = program("1f1b", TWO, 5)
    assert is_sound(made, TWO, 5, (2, 1))
    unsent = tuple(turn._replace(sends=()) for turn in made[0]), made[1]
    assert not is_sound(unsent, TWO, 5)
    with pytest.raises(AssertionError, match="the schedule cannot end: rank 0 waits forever before ChunkPass"):
        simulate(unsent, [1, 1], [1, 1])
    assert not is_sound(program("gpipe", TWO, 3), TWO, 3, (2, 3))
    forward, backward = program("gpipe", TWO, 1)[0]
    late = forward._replace(sends=()), backward._replace(sends=forward.sends)
    with pytest.raises(AssertionError, match="the schedule cannot end"):
        simulate((late, program("gpipe", TWO, 1)[1]), [1, 1], [1, 1])


def test_messages_take_turns_on_a_ranks_link_and_cost_it_no_time() -> None:
    pipeline = chained((0, 1, 2), [(0, 2)])
    line = simulate(
        program("gpipe", pipeline, 1), [1, 1, 1], [1, 1, 1], lambda route: 10 if route.tensor >= FIRST_SKIP else 2
    )
    start = {span.action: span.start for spans in line.spans for span in spans}
    assert start[ChunkPass(0, 1)] == 3  # 1 of work, 2 on the way
    assert start[ChunkPass(0, 2)] == 13  # the skip left after the activation: 1 + 2 + 10
    assert start[ChunkPass(0, 2, True)] == 14
    assert start[ChunkPass(0, 0, True)] == 15 + 2 + 10  # its gradient likewise
