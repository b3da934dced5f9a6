"""Cases that hypothesis draws are the same everywhere, and none is wrong for having taken long."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch

FIRST = (0.13436424411240122, 0.417022004702574, 0.7576315999031067)
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


@pytest.mark.parametrize("_again", [1, 2])
def test_draws_do_not_depend_on_the_tests_before(_again: int) -> None:
    """Of Python, NumPy and torch, as `conftest.py` sets them."""
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == FIRST
