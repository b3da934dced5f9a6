"""Bad input, one rank alone: one clear line, exit 2, no traceback, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.case import Case
from tests.bad_input.cases import CASES
from tests.bad_input.refusal import check_refusal, command


def test_there_are_many_cases_with_names_of_their_own() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) >= 60
    assert {case.command for case in CASES} == {"train", "predict", "evaluate", "plan", "tile", "scene", "doctor"}


@pytest.mark.parametrize("case", [case for case in CASES if case.least_ranks == 1], ids=str)
def test_refusal(case: Case, root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with check_refusal(case, root, capfd):
        assert command(case)(case.arguments(root)) == 2
