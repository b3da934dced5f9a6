"""Where a run ends and what its learning-rate policy counts, for runs that were changed on the way."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.config.run import OptimizerConfig
from tiledseg.raster.samples.sampling import Position
from tiledseg.training.steps.optimizer import Course, learning_rate

FIELDS = {"step": {"size": 2, "gamma": 0.5}, "polynomial": {"power": 1.0}}
POLICIES = ("constant", "step", "polynomial", "cosine")
legs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4)  # steps an epoch, epochs


def walked(legs: list[tuple[int, int]], epochs: int) -> list[tuple[Course, Position]]:
    """Course and position before each step of a run that starts a new leg at each resume."""
    step, position, marks, found = 0, Position(0, 0), ((0, 0),), []
    for per_epoch, length in legs:
        course = Course(epochs, per_epoch).onward(marks, step, position)
        marks = course.marks
        for epoch in range(position.epoch, position.epoch + length):
            for index in range(per_epoch):
                found.append((course, Position(epoch, index)))
                step += 1
        position = Position(position.epoch + length, 0)
    return found


@settings(derandomize=True, max_examples=200, deadline=None)
@given(legs=legs)
def test_the_end_is_that_of_the_last_epoch(legs: list[tuple[int, int]]) -> None:
    """Whatever a leg began with: what is done and what is left make the total, and the end comes at the last epoch."""
    epochs = sum(length for _, length in legs)
    run = walked(legs, epochs)
    for step, (course, position) in enumerate(run):
        assert not course.ends_at(position)
        left = (epochs - position.epoch) * course.steps_per_epoch - position.step
        assert course.total_steps == step + left
        assert math.floor(course.epochs_after(step)) == position.epoch
    assert run[-1][0].total_steps == len(run)
    assert run[-1][0].epochs_after(len(run)) == epochs
    assert run[-1][0].ends_at(Position(epochs, 0))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(legs=legs, policy=st.sampled_from(POLICIES), warmup=st.integers(0, 30))
def test_no_policy_jumps_or_passes_its_end(legs: list[tuple[int, int]], policy: str, warmup: int) -> None:
    """The rate rises step by step over the warm-up; then it falls, or stays, from lr on, and never past the end."""
    epochs = sum(length for _, length in legs)
    config = OptimizerConfig(lr=0.5, policy={"name": policy, **FIELDS.get(policy, {})}, warmup_steps=warmup)
    run = walked(legs, epochs)
    rates = [learning_rate(config, step, course) for step, (course, _) in enumerate(run)]
    assert rates[:warmup] == [0.5 * (step + 1) / warmup for step in range(min(warmup, len(run)))]
    after = list(enumerate(rates))[warmup:]
    assert all(0 < rate <= 0.5 for _, rate in after)
    for (step, rate), (_, later) in itertools.pairwise(after):
        assert later <= rate
        if policy in ("polynomial", "cosine"):
            course, _ = run[step]
            share = 1 / course.steps_per_epoch / float(epochs - course.epochs_after(warmup))
            assert rate - later <= 0.5 * math.pi / 2 * share + 1e-12, "more than its share of the way"


def test_a_run_changed_by_a_version_that_left_no_marks_goes_on() -> None:
    """Three epochs of other steps: what they were does not matter, only where they ended."""
    course = Course(6, 4).onward(((0, 0),), 8, Position(3, 1))
    assert course.marks == ((0, 0), (7, 3))
    assert course.total_steps == 7 + 3 * 4
    assert Course(6, 4).onward(((0, 0),), 13, Position(3, 1)).marks == ((0, 0),), "12 = 3 x 4: never changed"
