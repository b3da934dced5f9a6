"""The benchmark of large model support in its small form: every table, and losses alike in all ways."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.large_model_support import blocks
from benchmarks.large_model_support.__main__ import main


def test_a_step_in_blocks_runs_where_the_whole_one_is_killed(tmp_path: Path) -> None:
    blocks.SMALL.write(tmp_path)
    try:
        killed, done = blocks.limited(blocks.SMALL, tmp_path, blocks.SMALL_LIMIT, tmp_path)
    except blocks.NoControlGroupError as error:
        pytest.skip(str(error))
    assert killed.code == -9
    assert done.code == 0 < done.peak <= blocks.SMALL_LIMIT, "files that were read may fill the rest of the limit"


def test_the_small_form_fills_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--small", "--store", str(tmp_path)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("store: writes ")
    names = [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("| ")]
    assert names[2:5] == ["nothing", "save_on_cpu (frees nothing on a CPU)", "every block computed twice"]
    assert names[5:9] == [f"ours, {share}% kept" for share in (75, 50, 33, 25)]
    assert names[9:] == ["ours with model, 50% kept"]
    moved = [float(line.split(" | ")[5]) for line in lines if line.startswith("| ours,")]
    assert moved[-1] >= moved[0] > 0
    assert list(tmp_path.iterdir()) == []
