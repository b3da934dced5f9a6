"""Wall-time signals set a flag, and nothing else; the former handlers come back."""

from __future__ import annotations

import os
import signal

import pytest

from tiledseg.errors import ConfigError
from tiledseg.system.signals import deferring
from tiledseg.training import trainer
from tiledseg.training.trainer import StopFlag, end_of_job


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    met: list[int] = []
    former = signal.signal(number, lambda met_number, _: met.append(met_number))
    try:
        with deferring():
            flag = StopFlag()
            assert not flag.is_set
            os.kill(os.getpid(), number)
            assert flag.is_set
            assert met == []
            os.kill(os.getpid(), number)
            assert flag.is_set
        os.kill(os.getpid(), number)
        assert met == [number], "the former handler is back"
    finally:
        signal.signal(number, former)


def test_the_end_of_the_job_is_kept_clear_by_two_of_the_longest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(trainer.time, "time", lambda: now[0])
    monkeypatch.setattr(trainer, "is_met", lambda: False)
    flag, seen = StopFlag(end=1200), []
    for step in (10, 40, 10, 10, 10, 10):
        seen.append(flag.is_set)
        now[0] += step
    # Asked at 0, 10, 50, 60, 70, 80 of 200 seconds: two steps of 40 and 30 spare leave those up to 90.
    assert seen == [False] * 6
    now[0] = 1091
    assert flag.is_set
    assert not StopFlag().is_set, "nobody says when the job ends"


def test_who_says_when_the_job_ends() -> None:
    assert end_of_job({}) is None
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000", "TILEDSEG_END_TIME": "1600000000"}) == 1.6e9
    with pytest.raises(ConfigError, match="TILEDSEG_END_TIME is 'soon'; give Unix seconds"):
        end_of_job({"TILEDSEG_END_TIME": "soon"})
