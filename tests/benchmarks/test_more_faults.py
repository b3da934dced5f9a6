"""The second half of the random faults: a file of its own, so that another process of a serial run takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.fault_cases import SECONDS, check_half


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_more_random_faults_end_in_time_with_their_cause_and_cost_no_bit(tmp_path: Path) -> None:
    check_half(1, tmp_path)
