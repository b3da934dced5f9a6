"""Documents and docstrings keep to the mechanical part of plain prose, and name commands and keys that exist."""

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiledseg
from tests.comm.launching import PACKAGE, ROOT
from tiledseg.cli import COMMANDS, main
from tiledseg.commands.options import GROUPS, KEYS, as_config, parse_config
from tiledseg.commands.parser import Parser
from tiledseg.config.words import MOVED

KINDS = ("tutorials", "how-to", "reference", "explanation")
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "choosing.md"]
PAGES += [page for kind in KINDS for page in sorted((ROOT / "docs" / kind).glob("*.md"))]
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
LONGEST = 35  # words of a sentence
EXCEPTIONS = 0.01  # share of sentences that may be longer
PARTICIPLES = {"found", "asked", "told", "given", "seen", "at_once", "Given"}
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


def of_documents() -> Iterator[tuple[str, str]]:
    for page in ALL:
        yield str(page.relative_to(ROOT)), prose(page.read_text())


def of_docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"(?m)^ {4,}.*$", "", ast.get_docstring(node) or "")
                yield f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}", text


def of_helps() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def read(parser: Parser) -> str:
        found.extend((f"{parser.prog} {each.option_strings[0]}", each.help or "") for each in parser._actions)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "format_help", read)
        assert [main([command, "--help", "all"]) for command in COMMANDS] == [0] * len(COMMANDS)
    return found


@pytest.mark.parametrize(("texts", "least"), [(of_documents, 1000), (of_docstrings, 1000), (of_helps, 250)])
def test_sentences_are_short_and_begin_with_their_subject(
    texts: Callable[[], Iterable[tuple[str, str]]], least: int
) -> None:
    found = [(place, s) for place, text in texts() for s in sentences(text)]
    long = [f"{place}: {len(s.split())} words: {s[:70]}" for place, s in found if len(s.split()) > LONGEST]
    poor = [f"{place}: {s[:70]}" for place, s in found if s.capitalize().startswith(POOR_BEGINNINGS) and s[-1] != "?"]
    assert len(found) > least
    assert len(long + poor) <= EXCEPTIONS * len(found), "\n".join(long + poor)


def test_few_names_are_participles() -> None:
    nodes = [node for path in (ROOT / "tiledseg").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    assert sum(name in PARTICIPLES for name in names) <= EXCEPTIONS * len(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_keys_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for example in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        names = [
            n.attr
            for n in ast.walk(ast.parse(example))
            if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "tiledseg"
        ]
        assert set(names) <= {*tiledseg.__all__, "errors", "geometry"}
    for example in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        groups = yaml.safe_load(example)
        if set(groups) <= set(GROUPS):
            as_config(groups)
    named = set(re.findall(rf"`(?:--)?((?:{'|'.join(GROUPS)})\.[a-z_]+)", text))
    files = {"run.yaml", "train.tif", "model.safetensors", "optimizer.safetensors"}
    assert named - set(KEYS) - files - set(MOVED) == set()
    assert set(re.findall(r"(?:`|-n \d+ )tiledseg ([a-z]+)", text)) <= set(COMMANDS)


class _Parsed(BaseException):
    """A command's words are parsed: nothing more is wanted of it."""


def command_lines(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield mpirun's ranks and the words of each command of a page's examples, without comments and redirections."""
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in () if language in ("python", "yaml") else block.replace("\\\n", " ").splitlines():
            command = re.search(
                r"(?:mpirun -n (\d+).*?)?(?:^|[\s!])(?:tiledseg|-m tiledseg\.)\s?(doctor|[a-z]+ -.*)", line
            )
            if command and "..." not in line:
                yield command[1], shlex.split(re.split(r"\s[>&|#;]|;|\.sh ", command[2])[0], comments=True)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(ROOT.glob("*/*/README.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_examples_have_flags_and_values_that_their_commands_take(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are parsed, and not run: `test_examples.py` runs those of how-to pages, `test_site.py` the tutorials."""
    real = argparse.ArgumentParser.parse_known_args

    def parsed(parser: Parser, *words: Any) -> None:
        _, rest = real(parser, *words)
        if rest:
            monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", real)
            parse_config(rest, "tiledseg doctor", "")
        raise _Parsed

    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "mine.yaml", "old-run/config.yaml", "runs/run/config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("{}")
    for _, words in command_lines(page.read_text()):
        if words[0] == "train":
            assert parse_config(words[1:], "tiledseg train", "")
            continue
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
        with pytest.raises(_Parsed):
            assert not words, (words, main(words))
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", real)


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
    """All lines of docs/ but decisions, cells of tutorials included, and the two pages beside it."""
    lines = {page: len(page.read_text().splitlines()) for page in ALL if page not in DECISIONS}
    assert sum(count for page, count in lines.items() if page.is_relative_to(ROOT / "docs")) <= 3000
    assert sum(count for page, count in lines.items() if page.parent == ROOT) <= 94
    assert [str(page) for page in PAGES if lines[page] > 120] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_a_screen_in_the_one_form(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith(f"# {page.name[:4]}: ")
    assert len(lines) <= 45
    heads = [line for line in lines if line.startswith("## ")]
    assert heads[:2] == ["## Question", "## Choice"]
    assert set(heads[2:]) <= {"## Measured", "## Rejected", "## Limits"}
