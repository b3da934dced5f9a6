"""Write the reference from the code, and figures from benchmarks: `conf.py` replaces marks of pages by this text."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

from tiledseg.cli import COMMANDS, main
from tiledseg.commands.options import GROUPS, KEYS, as_yaml, example, meaning, takes
from tiledseg.config.checks import default_of

_CONTENTS = {
    "Tutorials": "tutorials/first-map own-imagery time-series four-ranks swin vit cluster-plan killed-run",
    "Choices and pictures": "choosing gallery",
    "How to": "how-to/install own-data own-network choose-tiles-or-layers out-of-memory batch-jobs *",
    "Reference": "reference/commands keys python *",
    "Explanation": "explanation/law halos halo-modes pipelines memory *",
    "Figures": "figures",
    "The code": "design reading-the-code decisions/*",
}
"""Captions of the site's contents, each with its pages in order: the first names the folder of those behind it."""


def contents() -> str:
    """Return the tables of contents that the sidebar shows."""
    parts = []
    for caption, words in _CONTENTS.items():
        first, *others = words.split()
        folder = first.rpartition("/")[0] + "/" if "/" in first else ""
        pages = [first, *(folder + other for other in others)]
        parts.append("\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", ":glob:", "", *pages, "```"]))
    return "\n\n".join(parts)


def keys() -> str:
    """Return a section for each group of the configuration, with a table of its keys."""
    head = "| key | default | takes | meaning | example |\n| --- | --- | --- | --- | --- |\n"
    parts = []
    for group, kind in GROUPS.items():
        title = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        rows = "\n".join(_row(key) for key in KEYS if key.startswith(f"{group}."))
        parts.append(f"## {group}\n{title}\n\n{head}{rows}")
    return "\n\n".join(parts)


def _row(key: str) -> str:
    cells = f"`{key}`", f"`{as_yaml(default_of(KEYS[key]))}`", takes(key), meaning(key), f"`{example(key)}`"
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@cache
def commands() -> str:
    """Return a section for each command with its help; `train` is left to the page of keys."""
    parts = []
    for name, purpose in COMMANDS.items():
        train = "Each key of `docs/reference/keys.md` is a flag: `--train.epochs 20`."
        text = train if name == "train" else f"```\n{_help(name)}\n```"
        parts.append(f"## {name}\n{purpose[0].upper()}{purpose[1:]}.\n\n{text}")
    return "\n\n".join(parts)


def _help(name: str) -> str:
    """Return the help as a process of its own prints it, on 100 columns."""
    os.environ["COLUMNS"] = "100"
    with redirect_stdout(io.StringIO()) as printed:
        main([name, "--help", "all"])
    return printed.getvalue().rstrip()


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_FIRST = {
    "title": r"^# (.+)",
    "sentence": r"^# .+\n\n((?:.+\n)+)",
    "command": r"^(```\n(?:.*\n)+?```)$",
    "table": r"^((?:\|.+\n)+)",
}


def figures() -> str:
    """Return a section for each page of a benchmark: its title, first sentence, first command and first table."""
    return "\n\n".join(_figure(page) for page in sorted(BENCHMARKS.glob("*/README.md")))


def _figure(page: Path) -> str:
    text, found = page.read_text(), {}
    for part, pattern in _FIRST.items():
        first = re.search(pattern, text, re.MULTILINE)
        if first is None:
            raise ValueError(f"{page}: no {part} for docs/figures.md; add one")
        found[part] = first[1].strip()
    source = f"Settings and more: `benchmarks/{page.parent.name}/README.md`."
    return "## {title}\n{sentence}\n\n{command}\n\n{table}\n\n".format(**found) + source
