"""A layer says everything about itself: nobody asks of which kind it is."""

from __future__ import annotations

import ast
from pathlib import Path

import tiledseg
from tiledseg.geometry.layers import convolutions, joins, resampling
from tiledseg.geometry.layers.layer import Layer
from tiledseg.models.blocks import BUILDERS

LIBRARY = Path(tiledseg.__file__).parent
LAYERS = (convolutions, joins, resampling)  # imported: their classes are then known as subclasses


def kinds(layer: type[Layer] = Layer) -> set[str]:
    return {layer.__name__}.union(*map(kinds, layer.__subclasses__()))


def named(node: ast.AST) -> set[str]:
    """The names in an expression, of modules' members too."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def asked(source: str) -> set[str]:
    """The kinds of layers that a module tells apart: by isinstance, by type(...), or by a pattern."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            found |= named(node.args[1])
        elif isinstance(node, ast.MatchClass):
            found |= named(node.cls)
        elif isinstance(node, ast.Compare) and any("type" in named(part) for part in (node.left, *node.comparators)):
            found |= named(node)
    return found & kinds()


def test_nobody_asks_a_layer_of_which_kind_it_is() -> None:
    asking = {str(path.relative_to(LIBRARY)): asked(path.read_text()) for path in LIBRARY.rglob("*.py")}
    assert {path: names for path, names in asking.items() if names} == {}


def test_every_layer_has_a_module() -> None:
    bases = {"Layer", "SlidingWindow", "Enlarging", "_Weighted", "Pool", "Join"}
    # Steps of the planner's walk; what tracing alone makes, with its modules, or takes over.
    elsewhere = {"MovedLayer", "PooledBranch", "ZeroAtZero"}
    assert kinds() - bases - elsewhere == {layer.__name__ for layer in BUILDERS}
