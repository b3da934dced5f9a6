"""The strong scaling of training in its small form: each job answers, and all have one loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.training.scaling import main


@pytest.mark.timeout(900)
def test_the_small_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    small = ["--side", "256", "--levels", "2", "--rounds", "1", "--epochs", "2", "--json", str(found)]
    monkeypatch.setattr(sys, "argv", ["scaling", *small])
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    assert main() == 0
    (each,) = json.loads(found.read_text())["rounds"]
    assert [len(epochs) for epochs in each.values()] == [2, 2, 2, 2]
    assert {name.split(", ")[-1] for name in each} == {
        "one rank",
        "2 processes that share nothing",
        "mode read",
        "mode layer",
    }
    assert "speed-up" in capsys.readouterr().out
