"""Differences between versions of torch: an old one is refused, and Gloo's lines are kept out of an answer."""

from __future__ import annotations

import configparser
import os
import re

import pytest
from packaging.requirements import Requirement

from tests.comm.launching import ROOT
from tiledseg.errors import ConfigError
from tiledseg.memory import device as torch_versions


def test_the_oldest_is_that_of_setup_cfg_and_an_older_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    (torch,) = [line for line in config["options"]["install_requires"].split() if line.startswith("torch")]
    oldest = ".".join(map(str, torch_versions.OLDEST))
    assert f">={oldest}" in map(str, Requirement(torch).specifier)
    torch_versions.check_version()
    monkeypatch.setattr(torch_versions, "_VERSION", (2, 7))
    with pytest.raises(ConfigError, match=rf"is too old, its ranks hang; pip install 'torch>={oldest}'"):
        torch_versions.check_version()


def test_the_makefile_runs_both_ends() -> None:
    named = dict(re.findall(r"^(\w+)_TORCH := (\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named["OLDEST"] == ".".join(map(str, torch_versions.OLDEST))
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
