"""What the pages print below a `tiledseg plan` is what the command prints now."""

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import NIGHTLY
from tiledseg.plan import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("how-to/find-settings.md", "how-to/out-of-memory.md", "reference/plan-output.md", "explanation/planning.md")


def printed(page: str) -> dict[str, list[list[str]]]:
    """Return the commands of the page, each with the blocks of output, or of some lines of it, that follow it."""
    outputs: dict[str, list[list[str]]] = {}
    above: list[list[str]] | None = None
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        command = re.fullmatch(r"tiledseg plan ([^\n]+)\n", text)
        if command:
            above = outputs.setdefault(command[1], [])
        elif language or text.startswith(("tiledseg ", "mpirun ")):
            above = None
        elif above is not None:
            above.append([line for line in text.splitlines() if line])
    return {command: blocks for command, blocks in outputs.items() if blocks}


PRINTED = {command: blocks for page in PAGES for command, blocks in printed((DOCS / page).read_text()).items()}


def first_not_printed(lines: list[str], output: list[str]) -> str | None:
    """The first of the lines that is not in the output after those before it."""
    rest = iter(output)
    return next((line for line in lines if line not in rest), None)


# By day tests/planning/search/test_search.py has studies of scaling.
@pytest.mark.parametrize("command", sorted(each for each in PRINTED if NIGHTLY or "--scaling" not in each))
def test_a_page_prints_what_the_command_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    output = capsys.readouterr().out
    for lines in PRINTED[command]:
        wrong = first_not_printed(lines, output.splitlines())
        assert wrong is None, f"a page has the line\n{wrong}\nbelow this command, which prints\n{output}"
