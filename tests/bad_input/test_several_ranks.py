"""Bad input met by several ranks at once: rank 0 alone speaks, in one line; the job's code is 2; nothing is written.

`test_one_rank.py` has every case. The list here has those in which ranks differ in their part: each way to fail, by
each command that ranks run together. Every case starts and ends a mesh of its own inside this one job. What a launcher
does is left out: it ends the ranks that wait to be ended. `test_one_rank.py` has it in.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answers import check_line
from tests.bad_input.cases import CASES, Case
from tests.small_files import tree
from tiledseg.comm import failure, session

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

NAMES = {
    # flags and files, which every rank reads before there is a mesh
    *("train-unknown-flag", "predict-unknown-flag", "doctor-format"),
    # files that rank 0 alone looks at
    *("train-labels-of-other-crs", "train-resume-of-other-levels", "predict-checkpoint-flipped", "tile-missing-image"),
    # plans, which rank 0 makes for all
    *("train-mesh-finer-than-the-grid", "train-norm-that-tiles-change", "predict-mesh-of-more-ranks-than-the-job"),
    # what the rank that reads the place finds, and the others hear of
    *("train-label-outside", "train-damaged-block", "train-no-label-counts", "train-store-with-a-flipped-pixel"),
}


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank that waits for the launcher's signal leaves at once, and one that would abort the job returns its code."""
    monkeypatch.setattr(failure, "_wait_to_be_ended", sys.exit)
    monkeypatch.setattr(session, "_end", lambda launch, code: code)
    monkeypatch.setattr(session, "_HEAD_START_SECONDS", 0.0)
    monkeypatch.setattr(failure, "_PASS_ON_SECONDS", 0.0)
    yield
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()  # left by a rank that failed alone: the next case starts afresh


def test_the_names_are_those_of_cases() -> None:
    assert {str(case) for case in CASES} >= NAMES


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in NAMES or case.least_ranks > 1], ids=str)
def test_refusal(
    case: Case, root: Path, world: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    before = tree(root)
    capfd.readouterr()
    world.Barrier()
    code = code_of(case, root)
    world.Barrier()
    after, (out, err) = tree(root), capfd.readouterr()
    codes, said = world.allgather(code), world.allgather((out, err))
    assert codes[0] == 2
    assert set(codes) <= {0, 2}  # a rank that agrees leaves with 0, so that its launcher lets rank 0 speak first
    assert set(said[1:]) == {("", "")}
    assert said[0][0] == ""
    check_line(said[0][1], *case.words)
    assert "rank 0" not in said[0][1].removeprefix("error: ")[:6]
    assert after == before


def code_of(case: Case, root: Path) -> int:
    try:
        return case.run(root)
    except SystemExit as ended:  # by the launcher that is not there
        return int(ended.code or 0)
