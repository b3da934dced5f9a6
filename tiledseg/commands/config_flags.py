"""`--config FILE` for commands whose options argparse reads: what the file holds stands as flags in its place.

A later word wins, as among flags, and the flag judges its value. The file is read, and refused, as that of `train`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tiledseg.commands.parser import Parser
from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.user_files.yaml_text import check_keys, read_yaml

_CONFIG = "--config"
_NO_KEYS = ("config", "help")


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The options that flags and `--config` files give; `config` holds the names of the files.

    Raises ConfigError for an unknown key, a value that its flag does not take or an unreadable file.
    """
    parser.add_argument(_CONFIG, action="append", default=[], metavar="FILE", help="YAML file of any of these options")
    expanded: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        expanded.append(word)
        name, _, path = word.partition("=")
        if before == _CONFIG:
            expanded += _flags(word, parser)
        elif name == _CONFIG and path:
            expanded += _flags(path, parser)
    return parser.parse_args(expanded)


def _flags(path: str, parser: Parser) -> list[str]:
    """The file's keys as words of the command line. A key has `_` where the flag has `-`."""
    options = {
        name[2:].replace("-", "_"): action
        for action in parser._actions
        for name in action.option_strings
        if name[:2] == "--"
    }
    known: dict[str, list[str]] = {}
    for option in (name for name, action in options.items() if action.dest not in _NO_KEYS and name[:3] != "no_"):
        group, _, key = option.partition(".")
        known.setdefault(group, []).extend([key] if key else [])
    values = check_keys(path, read_yaml(path), known)
    pairs = ((f"{name}.{key}" if key else name, value) for name, key, value in _leaves(values, known))
    return [_flag(path, option, value, options[option]) for option, value in pairs]


def _leaves(values: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> list[tuple[str, str, Any]]:
    plain = [(name, "", value) for name, value in values.items() if not known[name]]
    return plain + [(name, key, value) for name in values if known[name] for key, value in values[name].items()]


def _flag(path: str, option: str, value: Any, action: argparse.Action) -> str:
    """One word. A list or a map is written as JSON, which only flags with a reader of it take."""
    flag = option.replace("_", "-")
    if value is None:
        raise ConfigError(f"{path}: {option} is null; give a value, or leave it out")
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {option} is {shown(value)}; give true or false")
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, (list, dict)) and action.type is str:
        raise ConfigError(f"{path}: {option} is {shown(value)}; give text")
    if isinstance(value, (bool, list, dict)):
        return f"--{flag}={json.dumps(value, default=str)}"
    return f"--{flag}={value}"
