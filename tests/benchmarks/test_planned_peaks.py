"""The sweep of planned peaks, in small: every setting is within 2 % of what PyTorch allocates."""

from __future__ import annotations

import re

import pytest

from benchmarks.planned_peaks import main


def test_planned_peaks_are_what_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--levels", "2", "--norms", "none", "instance"])
    (line,) = capsys.readouterr().out.splitlines()
    words = re.fullmatch(r"(\d+) of (\d+) within 2 %, half within [\d.]+%, the worst [-+][\d.]+% planned", line)
    assert words is not None
    assert int(words[1]) == int(words[2]) > 20
