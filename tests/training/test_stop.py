"""Wall-time signals set a flag, and nothing else; the former handlers come back."""

from __future__ import annotations

import os
import signal

import pytest

from tiledseg.training.stop import EXIT_CODE, StopFlag


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    met: list[int] = []
    former = signal.signal(number, lambda met_number, _: met.append(met_number))
    try:
        with StopFlag() as flag:
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


def test_handlers_come_back_after_an_error_too() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError), StopFlag():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_code_is_the_one_that_batch_systems_requeue_on() -> None:
    assert EXIT_CODE == os.EX_TEMPFAIL == 75
