"""How is a package written? Counted figures of its sources, side by side with those of others.

    python -m benchmarks.code_figures tiledseg [FOLDER ...]

FOLDER holds a package's Python files, tests apart. A function's lines are those from `def` to its end without its
docstring; arguments are those of `__init__` without `self`. An error counts as one with a value where its text is put
together from one (an f-string, or `%`). A circle: modules that import each other, however far round and wherever in the
file, except for type checkers. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.spread import markdown

LONG_FILE, LONG_FUNCTION = 330, 30
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(folders: Sequence[str]) -> None:
    found = [figures(Path(folder)) for folder in folders]
    rows = [[name, *(each[name] for each in found)] for name in found[0]]
    print(markdown(["figure", *(Path(folder).resolve().name for folder in folders)], rows))


def figures(folder: Path) -> dict[str, str]:
    """Each figure of a package by its name, for a table."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")) if path.stat().st_size}
    sizes = [len(path.read_text().splitlines()) for path in trees]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    lines = [_length(function) for function in functions]
    public = [function for function in functions if not function.name.startswith("_")]
    arguments = [len(_arguments(function)) for function in functions if function.name == "__init__"]
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    circled = sorted(name for circle in circles(imports(folder, trees)) for name in circle)
    return {
        "files, lines": f"{len(sizes)}, {sum(sizes)}",
        "lines of a file: median, longest": f"{median(sizes):g}, {max(sizes)}",
        f"files over {LONG_FILE} lines": f"{sum(size > LONG_FILE for size in sizes)}",
        "lines of a function: median, longest": f"{median(lines):g}, {max(lines)}",
        f"functions, those over {LONG_FUNCTION} lines": f"{len(lines)}, {sum(n > LONG_FUNCTION for n in lines)}",
        "arguments of a constructor: median, most": f"{median(arguments):g}, {max(arguments)}",
        "functions with all types": _share(sum(map(_typed, functions)), len(functions)),
        "public functions with a docstring": _share(sum(map(_told, public)), len(public)),
        "errors made, those with a value": _share(sum(map(_has_value, raised)), len(raised)),
        "modules in circles of imports": f"{len(circled)}",
    }


def imports(folder: Path, trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Of each module of a package, those of the same package that it imports."""
    names = {path: _module(folder, path) for path in trees}
    known = set(names.values())
    edges: dict[str, set[str]] = {}
    for path, name in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        edges[name] = set(_targets(trees[path], package, folder.name, known)) & known - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reach = {name: _reached(edges, name) for name in edges}
    groups = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in edges}
    return [set(group) for group in groups if len(group) > 1]


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _module(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((folder.name, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _targets(tree: ast.Module, package: str, top: str, known: set[str]) -> Iterator[str]:
    """What a module of `package` imports: of `from a import b` the module a.b where there is one, else a."""
    for node in _without_type_checking(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if not node.level and f".{top}" in base:  # a package within another: `odc.geo` is `geo` here
                base = base[base.index(f".{top}") + 1 :]
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _without_type_checking(child)


def _length(function: Function) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    return lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def _arguments(function: Function) -> list[ast.arg]:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [argument for argument in every if argument.arg not in ("self", "cls")]


def _typed(function: Function) -> bool:
    given = all(argument.annotation for argument in _arguments(function))
    return given and (function.returns is not None or function.name == "__init__")


def _told(function: Function) -> bool:
    return ast.get_docstring(function) is not None


def _has_value(made: ast.Call) -> bool:
    return any(
        isinstance(node, ast.FormattedValue) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))
        for node in ast.walk(made)
    )


def _share(part: int, whole: int) -> str:
    return f"{whole}, {part} ({100 * part / max(whole, 1):.0f} %)"


if __name__ == "__main__":
    main(sys.argv[1:] or ["tiledseg"])
