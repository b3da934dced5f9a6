"""Differences between versions of torch: both ends are tested, and Gloo's lines are kept out of an answer."""

from __future__ import annotations

import os
import re

import pytest

from tests.comm.launching import ROOT
from tiledseg.memory import device as torch_versions


def test_the_makefile_runs_both_ends() -> None:
    named = dict(re.findall(r"^(\w+)_TORCH := (\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    below = f"<2.{int(named['NEWEST'].split('.')[1]) + 1}"
    assert f"torch>={named['OLDEST']},{below}" in (ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize(("version", "on_output"), [((2, 8), ""), ((2, 15), "line\n")])
def test_lines_of_gloo_go_to_standard_error(
    version: tuple[int, int], on_output: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_versions, "_VERSION", version)
    with torch_versions.gloo_connects():
        os.write(1, b"line\n")
    os.write(1, b"answer\n")
    assert capfd.readouterr() == (f"{on_output}answer\n", "line\n" if not on_output else "")
