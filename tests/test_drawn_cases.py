"""Cases that hypothesis draws are the same everywhere, and none is wrong for having taken long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DRAWING = sorted(path for path in TESTS.rglob("*.py") if "\nfrom hypothesis import" in path.read_text())


def _name(decorator: ast.expr) -> str:
    """Of what is called, or stands there."""
    found = decorator.func if isinstance(decorator, ast.Call) else decorator
    return found.id if isinstance(found, ast.Name) else ""


@pytest.mark.parametrize("path", DRAWING, ids=lambda path: str(path.relative_to(TESTS)))
def test_cases_are_drawn_without_chance_and_clock(path: Path) -> None:
    """Each test that draws has settings, and all of them say so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and "given" in (names := [_name(each) for each in node.decorator_list]):
            assert len(names) > 1, f"{node.name} has hypothesis' own settings: draws by chance, within 0.2 s each"
        if isinstance(node, ast.Call) and _name(node) == "settings":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert (given.get("derandomize"), given.get("deadline")) == ("True", "None"), f"line {node.lineno}"
