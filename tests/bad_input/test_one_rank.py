"""Bad input, one rank alone, and three under a real mpirun: one clear line, exit 2, no traceback, nothing written."""

from pathlib import Path

import pytest

from tests.answers import check_line
from tests.bad_input.cases import CASES, Case
from tests.comm.launching import mpirun, needs_mpirun
from tests.small_files import tree
from tiledseg.cli import COMMANDS

LAUNCHED = ("train-label-outside", "predict-damaged-block")


def test_the_cases_have_names_of_their_own() -> None:
    """Every command is among them, and all that the tests without a launcher leave out among the launched."""
    names = {str(case) for case in CASES}
    assert len(names) == len(CASES)
    assert {case.command for case in CASES} == COMMANDS.keys() - {"report"}
    assert set(LAUNCHED) <= names


@pytest.mark.parametrize("case", [case for case in CASES if case.least_ranks == 1], ids=str)
def test_refusal(case: Case, root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    before = tree(root)
    capfd.readouterr()
    assert case.run(root) == 2
    out, err = capfd.readouterr()
    assert out == ""
    check_line(err, *case.words)
    assert case.command != "tile" or "data." not in err.replace("data.references", "")
    assert tree(root) == before


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if str(case) in LAUNCHED], ids=str)
def test_refusal_by_three_ranks(case: Case, root: Path) -> None:
    """mpirun itself exits 2."""
    before = tree(root)
    done = mpirun(3, "-m", f"tiledseg.{case.command}", *case.arguments(root), seconds=200)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert len(done.errors) == 1, done.err
    check_line(done.errors[0] + "\n", *case.words)
    assert tree(root) == before
