"""Faults are found, all of them; times follow the model; drawings say what they draw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.chained import FIRST_SKIP, chained
from tests.pipeline.faults import faults
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.pipeline.schedule import (
    Backward,
    Forward,
    MessageEnd,
    Program,
    ReceiveActivation,
    Route,
    SendActivation,
    program,
)
from tiledseg.pipeline.simulation import draw, simulate, verify

law = settings(derandomize=True, max_examples=40, deadline=None)
TWO = chained((0, 1))


def without(made: Program, rank: int, index: int) -> Program:
    actions = made[rank][:index] + made[rank][index + 1 :]
    return (*made[:rank], actions, *made[rank + 1 :])


@law
@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 4), st.data())
def test_any_action_left_out_or_done_twice_is_a_fault(
    schedule: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    pipeline = chained(chunk_ranks(schedule, stages), [(0, stages - 1)])
    made = program(schedule, pipeline, micro_batches)
    rank = data.draw(st.integers(0, stages - 1))
    index = data.draw(st.integers(0, len(made[rank]) - 1))
    assert faults(without(made, rank, index), pipeline, micro_batches)
    twice = (*made[:rank], (*made[rank], made[rank][index]), *made[rank + 1 :])
    assert any("2 times" in fault for fault in faults(twice, pipeline, micro_batches))


@law
@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 4), st.data())
def test_a_backward_before_its_forward_is_a_fault(
    schedule: str, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    pipeline = chained(chunk_ranks(schedule, stages))
    made = program(schedule, pipeline, micro_batches)
    rank, m = data.draw(st.integers(0, stages - 1)), data.draw(st.integers(0, micro_batches - 1))
    forward, backward = made[rank].index(Forward(m, rank)), made[rank].index(Backward(m, rank))
    actions = list(made[rank])
    actions[forward], actions[backward] = actions[backward], actions[forward]
    broken = (*made[:rank], tuple(actions), *made[rank + 1 :])
    words = f"does 'backward of micro-batch {m}, chunk {rank}' before 'forward of micro-batch {m}, chunk {rank}'"
    assert any(words in fault for fault in faults(broken, pipeline, micro_batches))


def test_all_faults_are_listed_at_once() -> None:
    made = program("1f1b", TWO, 2)
    sends = [i for i, a in enumerate(made[0]) if isinstance(a, SendActivation)]
    broken = without(without(made, 0, sends[1]), 0, sends[0])
    found = faults(broken, TWO, 2)
    assert sum("lacks the send of the activation" in fault for fault in found) == 2
    assert sum("waits forever" in fault for fault in found) == 2
    with pytest.raises(ConfigError, match=r"does not fit its pipeline: .*;.*") as caught:
        verify(broken, 2, [2, 1])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="rank 0 waits forever at: receive of the gradient of micro-batch 0"):
        simulate(broken, [1, 1], [1, 1])


def test_a_cycle_of_two_ranks_that_wait_for_each_other() -> None:
    """Rank 0 wants a gradient of rank 1 before it sends what rank 1 waits for; every message has both its ends."""
    made = program("gpipe", TWO, 1)
    forward, send, receive, backward = made[0]
    found = faults(((forward, receive, send, backward), made[1]), TWO, 1)
    assert len(found) == 2
    assert "rank 0 waits forever at: receive of the gradient" in found[0]
    assert "rank 1 waits forever at: receive of the activation" in found[1]


def test_too_many_in_flight() -> None:
    made = program("gpipe", TWO, 3)
    assert faults(made, TWO, 3, [3, 3]) == []
    assert faults(made, TWO, 3, [2, 3]) == ["chunk 0 holds 3 micro-batches at once, but at most 2 are allowed"]


def test_a_message_to_the_wrong_rank_and_a_needless_one() -> None:
    made = program("gpipe", TWO, 1)
    stray = SendActivation(0, Route(0, 1, 1), 5)
    found = faults(((made[0][0], stray, *made[0][2:]), made[1]), TWO, 1)
    assert any("lacks the send" in fault for fault in found)
    assert any("needless send" in fault and "rank 5" in fault for fault in found)


def test_verify_says_nothing_of_a_sound_program() -> None:
    verify(program("1f1b", TWO, 5), 2, [2, 1])


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
    assert line.busy_share + line.bubble_share == pytest.approx(1)
    assert line.busy_share == pytest.approx(sum(work) / (stages * line.makespan))


def test_messages_take_turns_on_a_ranks_link_and_cost_it_no_time() -> None:
    pipeline = chained((0, 1, 2), [(0, 2)])
    line = simulate(
        program("gpipe", pipeline, 1), [1, 1, 1], [1, 1, 1], lambda route: 10 if route.tensor >= FIRST_SKIP else 2
    )
    start = {span.action: span.start for spans in line.spans for span in spans}
    assert start[Forward(0, 1)] == 3  # 1 of work, 2 on the way
    assert start[Forward(0, 2)] == 13  # the skip left after the activation: 1 + 2 + 10
    assert start[Backward(0, 2)] == 14
    assert start[Backward(0, 0)] == 15 + 2 + 10  # its gradient likewise


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


@law
@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 40), st.integers(40, 140))
def test_drawings_keep_their_width(schedule: str, stages: int, micro_batches: int, width: int) -> None:
    pipeline = chained(chunk_ranks(schedule, stages))
    made = program(schedule, pipeline, micro_batches)
    lines = draw(made, pipeline, width).splitlines()
    assert len(lines) == stages
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("stage 0 F0")
    whole = draw(made, pipeline, 10**6)
    for m in range(micro_batches):
        count = whole.split().count
        assert (count(f"F{m}") + count(f"f{m}"), count(f"B{m}") + count(f"b{m}")) == (
            len(pipeline.ranks), 2 * len(pipeline.ranks)
        )  # fmt: skip


def test_a_receive_needs_no_send_of_another_micro_batch() -> None:
    made = program("gpipe", TWO, 2)
    receives = [i for i, a in enumerate(made[1]) if isinstance(a, ReceiveActivation)]
    assert [a.micro_batch for a in made[1] if isinstance(a, MessageEnd)][:2] == [0, 1]
    swapped = list(made[1])
    swapped[receives[0]], swapped[receives[1]] = swapped[receives[1]], swapped[receives[0]]
    assert any("before" in fault for fault in faults((made[0], tuple(swapped)), TWO, 2))
