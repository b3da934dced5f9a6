"""The tests marked `cuda` of one rank, on the pretend GPU."""

from __future__ import annotations

import pytest

from tests.pretend_gpu.harness import PretendGpu

FILES = (
    "tests/execution/test_fetching.py",
    "tests/pipeline/test_devices.py",
    "tests/law/test_devices.py",
    "tests/memory/test_host_on_gpu.py",
)
# Hundreds of MiB, and rates that only a GPU has.
TOO_LARGE = "a_loop_ends or allocators_peak or rates_of or a_calibration or bytes_go_out"


@pytest.mark.timeout(400)
def test_tests_of_a_gpu(pretend_gpu: PretendGpu) -> None:
    words = ["-q", "--color=no", "-x", "-p", "no:cacheprovider", "-m", "cuda", "-k", f"not ({TOO_LARGE})"]
    ran = pretend_gpu.run(["-m", "pytest", *words, *FILES], timeout=380).sound()
    assert "skipped" not in ran.output.splitlines()[-1]
