"""A fixture for tests of stores: nothing of them is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Looking through all that is loaded takes a third of a second, twice a test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def everything_is_given_back(frozen: None) -> Iterator[None]:
    """No descriptor and no thread is left, at most a moment after the last graph is gone (a minute on a machine that
    others load)."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()
    until = time.monotonic() + 60
    while (now := (len(os.listdir("/proc/self/fd")), threading.active_count())) != before and time.monotonic() < until:
        time.sleep(0.02)
    assert now == before
