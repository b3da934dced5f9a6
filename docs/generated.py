"""Write the reference of commands and keys from the code: pages hold a mark, which `conf.py` replaces by this text."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from tiledseg.cli import COMMANDS
from tiledseg.commands.key_help import GROUPS, KEYS, default, example, meaning, takes


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
    cells = f"`{key}`", f"`{default(KEYS[key])}`", takes(KEYS[key]), meaning(key), f"`{example(key)}`"
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
    done = subprocess.run(
        [sys.executable, "-m", f"tiledseg.{name}", "--help"],
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip()
