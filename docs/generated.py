"""Write the reference of commands and keys from the code: pages hold a mark, which `conf.py` replaces by this text."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import MISSING, Field
from functools import cache
from typing import Any

from tiledseg.cli import COMMANDS
from tiledseg.commands.options import KEYS, help_of_group
from tiledseg.config.checks import Range, range_of
from tiledseg.config.run import Config

LARGEST = 2**31 - 2  # a larger end of a range stands for none


def keys() -> str:
    """Return a section for each group of the configuration, with a table of its keys."""
    head = "| key | default | takes | meaning |\n| --- | --- | --- | --- |\n"
    parts = []
    for group in dict.fromkeys(key.partition(".")[0] for key in KEYS):
        kind: Any = Config.__dataclass_fields__[group].default_factory
        title, meanings = " ".join((kind.__doc__ or "").split("\n\n")[0].split()), help_of_group(group)
        own = {key: field for key, field in KEYS.items() if key.startswith(f"{group}.")}
        rows = "\n".join(_row(key, field, meanings[field.name]) for key, field in own.items())
        parts.append(f"## {group}\n{title}\n\n{head}{rows}")
    return "\n\n".join(parts)


def _row(key: str, field: Field[Any], meaning: str) -> str:
    cells = f"`{key}`", f"`{_default(field)}`", _takes(field), meaning
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _default(field: Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return "required"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _takes(field: Field[Any]) -> str:
    """Return the words or the range that a key takes; its type where it has neither."""
    words, allowed = field.metadata.get("words"), range_of(field)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    return _range(allowed) if allowed else str(field.type).replace("Literal", "").replace("['", "'").replace("']", "'")


def _range(allowed: Range) -> str:
    kind = "whole number" if allowed.whole else "number"
    least = f"{'above' if allowed.above else 'from'} {allowed.least:g}"
    most = "" if allowed.most >= LARGEST else f" {'below' if allowed.below else 'to'} {allowed.most:g}"
    return f"{kind} {least}{most}"


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
