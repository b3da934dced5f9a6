"""Faults are found, all of them; times follow the model; drawings say what they draw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.chained import FIRST_SKIP, chained, draw, is_sound
from tiledseg.config.words import SCHEDULES, chunk_ranks
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


@law
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 10),
    st.lists(st.integers(1, 9), min_size=9, max_size=9),
    st.integers(0, 9),
)
def test_bounds_of_the_makespan(
    schedule: str, stages: int, micro_batches: int, times: list[int], transfer: int
) -> None:
    """No rank beats its own work, no micro-batch its own way, and slower messages never end sooner."""
    ranks = chunk_ranks(schedule, stages)
    forward = times[: len(ranks)]
    backward = [2 * f for f in forward]
    made = program(schedule, chained(ranks), micro_batches)
    line, slower = (simulate(made, forward, backward, lambda route, t=t: t) for t in (0, transfer))  # type: ignore[misc]
    work = [
        3 * micro_batches * sum(f for f, r in zip(forward, ranks, strict=True) if r == rank) for rank in range(stages)
    ]
    assert line.busy == slower.busy == tuple(work)
    assert max(*work, 3 * sum(forward)) <= line.makespan <= sum(work)
    assert line.makespan <= slower.makespan
    assert line.busy_share == pytest.approx(sum(work) / (stages * line.makespan))


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


def test_drawings() -> None:
    assert draw(program("1f1b", TWO, 2), TWO) == (
        "stage 0 F0 F1 .  .  B0 B0 .  B1 B1\n"
        "stage 1 .  F0 B0 B0 F1 B1 B1 .  ."
    )  # fmt: skip
    folded = chained((0, 1, 0))
    assert draw(program("folded", folded, 1), folded) == (
        "stage 0 F0 .  f0 b0 b0 .  .  B0 B0\n"
        "stage 1 .  F0 .  .  .  B0 B0 .  ."
    )  # fmt: skip
