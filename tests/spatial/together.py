"""Laws of hypothesis over several ranks: rank 0 draws the examples and all ranks check each of them together.

Each rank for itself would draw the same at first, but hypothesis steers by what it has seen, the clock included.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.spatial.twins import AgreedFaultError, OpenAxes

T = TypeVar("T")


def for_all(opened: OpenAxes, strategy: SearchStrategy[T], check: Callable[[T], None], examples: int) -> None:
    """`check`, which fails on all ranks or on none, holds for what `strategy` draws. Collective over the job.

    What is drawn must pickle. Where it fails rank 0 shrinks the example, with the others' help, and reports it.
    """
    communicator = opened.mesh.communicator
    check = _or_end_the_job(check, opened.say)

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def law(drawn: T) -> None:
        communicator.broadcast_object(("check", drawn))
        check(drawn)

    if opened.mesh.is_root:
        outcome = "failed"
        try:
            law()
            outcome = "passed"
        finally:
            communicator.broadcast_object((outcome, None))
        return
    while (message := communicator.broadcast_object(None))[0] == "check":
        try:
            check(message[1])
        except AgreedFaultError as error:
            last = error  # rank 0 has it too and shrinks on
    if message[0] == "failed":
        raise last


def _or_end_the_job(check: Callable[[T], None], say: Callable[[str], None]) -> Callable[[T], None]:
    """Where this rank alone breaks down the others wait for it in vain: say why and take them along."""

    def checked(drawn: T) -> None:
        try:
            check(drawn)
        except AgreedFaultError:
            raise
        except Exception:
            say(f"{traceback.format_exc()}\nwhile checking {drawn}\n")
            os._exit(1)

    return checked
