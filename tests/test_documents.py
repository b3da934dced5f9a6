"""Documents and docstrings keep to the mechanical part of plain prose, and name commands and keys that exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiledseg.cli import COMMANDS
from tiledseg.commands.options import GROUPS, KEYS
from tiledseg.config.words import MOVED

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("tutorials", "how-to", "reference", "explanation")
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "choosing.md"]
PAGES += [page for kind in KINDS for page in sorted((ROOT / "docs" / kind).glob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
LONGEST = 35  # words of a sentence
EXCEPTIONS = 0.01  # share of sentences that may be longer
POOR_BEGINNINGS = ("What ", "Of ", "Whether ", "By ", "Away ", "Who ")


def prose(text: str) -> str:
    """Return the text without code, tables, headings and names of pages."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "![", "<!--"))]
    return "\n".join(lines)


def sentences(text: str) -> Iterator[str]:
    """Yield sentences: a blank line, an item of a list, or a full stop with a blank ends one."""
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        for sentence in re.split(r"(?<=[.:!?])\s+(?=[A-Z`*(])", " ".join(block.split())):
            if sentence:
                yield re.sub(r"^([-*]|\d+\.) ", "", sentence)


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tiledseg").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def faults(found: list[tuple[str, str]]) -> list[str]:
    long = [f"{place}: {len(s.split())} words: {s[:70]}" for place, s in found if len(s.split()) > LONGEST]
    poor = [f"{place}: {s[:70]}" for place, s in found if s.startswith(POOR_BEGINNINGS)]
    return long + poor


def test_sentences_of_documents_are_short_and_begin_with_their_subject() -> None:
    found = [(str(p.relative_to(ROOT)), s) for p in PAGES for s in sentences(prose(p.read_text()))]
    wrong = faults(found)
    assert len(wrong) <= EXCEPTIONS * len(found), f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)


def test_sentences_of_docstrings_are_short_and_begin_with_their_subject() -> None:
    found = [(place, s) for place, text in docstrings() for s in sentences(re.sub(r"(?m)^ {4,}.*$", "", text))]
    wrong = faults(found)
    assert len(wrong) <= EXCEPTIONS * len(found), f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_keys_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"`(?:--)?((?:{'|'.join(GROUPS)})\.[a-z_]+)", text))
    files = {"run.yaml", "train.tif", "model.safetensors", "optimizer.safetensors"}
    assert named - set(KEYS) - files - set(MOVED) == set()
    assert set(re.findall(r"(?:`|-n \d+ )tiledseg ([a-z]+)", text)) <= set(COMMANDS)


def test_mpirun_is_the_last_command_of_its_cell() -> None:
    """A cell's later lines are mpirun's standard input: it reads them, and bash finds none."""
    cells = [
        (page.name, cell.replace("\\\n", " ").split("mpirun ", 1)[1].splitlines()[1:])
        for page in (ROOT / "docs/tutorials").glob("*.md")
        for cell in re.findall(r"%%bash.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        if "mpirun " in cell
    ]
    assert len(cells) > 4
    assert [cell for cell in cells if cell[1]] == []


def test_pages_of_benchmarks_are_short_and_have_what_the_page_of_figures_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    figures = importlib.import_module("generated").figures()
    pages = sorted((ROOT / "benchmarks").glob("*/README.md"))
    assert [line for line in figures.splitlines() if line.startswith("## ")] == [
        page.read_text().splitlines()[0].replace("# ", "## ") for page in pages
    ]
    assert [str(page) for page in pages if len(page.read_text().splitlines()) > 60] == []


def test_pages_are_short() -> None:
    assert [str(page) for page in PAGES if len(page.read_text().splitlines()) > 120] == []
    assert sum(len(page.read_text().splitlines()) for page in PAGES) <= 3000


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_a_screen_in_the_one_form(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith(f"# {page.name[:4]}: ")
    assert len(lines) <= 45
    heads = [line for line in lines if line.startswith("## ")]
    assert heads[:2] == ["## Question", "## Choice"]
    assert set(heads[2:]) <= {"## Measured", "## Rejected", "## Limits"}
