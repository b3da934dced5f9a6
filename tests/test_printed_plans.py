"""What docs/plan.md prints below a command is what the command prints now.

Commands of docs/large-models.md are followed by tables, not by their output, and take ten seconds and more: they are
not run here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tiledseg.plan import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "plan.md").read_text()
# A block of one command, and the block of its output, or of some lines of it, right below.
PRINTED: dict[str, str] = dict(
    re.findall(r"^```\ntiledseg plan ([^\n]+)\n```\n```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


def first_not_printed(lines: list[str], output: list[str]) -> str | None:
    """The first of the lines that is not in the output after those before it."""
    rest = iter(output)
    return next((line for line in lines if line not in rest), None)


@pytest.mark.parametrize("command", sorted(PRINTED))
def test_the_page_prints_what_the_command_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    output = capsys.readouterr().out
    wrong = first_not_printed([line for line in PRINTED[command].splitlines() if line], output.splitlines())
    assert wrong is None, f"docs/plan.md has the line\n{wrong}\nbelow this command, which prints\n{output}"


def test_the_page_has_a_command_above_each_output_of_plan() -> None:
    """So that no block of output escapes: the headings of outputs stand in blocks that were found."""
    heading = re.compile(r"^(?:paper|stages|search|scaling): |^  balance, ", re.MULTILINE)
    assert sum(len(heading.findall(output)) for output in PRINTED.values()) == len(heading.findall(PAGE))


def test_a_wrong_figure_is_found() -> None:
    lines = next(lines for command, lines in PRINTED.items() if "--scaling 64:1536" in command).splitlines()
    assert first_not_printed(lines, ["before", *lines, "after"]) is None
    assert first_not_printed(lines, [line.replace("65.7 %", "67.4 %") for line in lines]) == lines[7]
    assert first_not_printed(lines[::-1], lines) == lines[-2]


def test_the_plan_that_the_page_of_clusters_advises_says_how_long_an_epoch_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = re.search(r"`tiledseg plan (--search [^`]+)` says how long", (ROOT / "docs" / "cluster.md").read_text())
    assert command is not None
    assert main(command[1].split()) == 0
    assert re.search(r"epoch.*\n  layer, .*mesh \d+ x \d+ .* s .*chosen", capsys.readouterr().out)
