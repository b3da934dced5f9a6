"""Figures of sources are counted as the benchmark says."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.code_figures import circles, figures, imports

ONE = '''"""A module."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from room.two import other


class Thing:
    def __init__(self, size: int, *, name: str = "") -> None:
        self.size = size


def tell(size):
    """A docstring
    of two lines."""
    if size < 0:
        raise ValueError("negative")
    raise ValueError(f"size is {size}")
'''
TWO = """import room.three


def other() -> None:
    from . import one
"""


def test_figures_of_a_small_package(tmp_path: Path) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    texts = {"__init__": "", "one": ONE, "two": TWO, "three": "from room.two import other\n"}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    found = figures(folder)
    assert found["files, lines"] == "3, 24"
    assert found["lines of a function: median, longest"] == "2, 4"
    assert found["arguments of a constructor: median, most"] == "2, 2"
    assert found["functions with all types"] == "3, 2 (67 %)"
    assert found["public functions with a docstring"] == "2, 1 (50 %)"
    assert found["errors made, those with a value"] == "2, 1 (50 %)"
    trees = {path: ast.parse(path.read_text()) for path in folder.glob("[ot]*.py")}
    edges = imports(folder, trees)
    assert edges == {"room.one": set(), "room.two": {"room.one", "room.three"}, "room.three": {"room.two"}}
    assert circles(edges) == [{"room.two", "room.three"}]
    assert found["modules in circles of imports"] == "2"
