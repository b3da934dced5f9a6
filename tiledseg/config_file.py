"""Configurations from flags and YAML files (jsonargparse), to YAML (the run's `config.yaml`) and from JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from tiledseg.config import Config
from tiledseg.errors import ConfigError


def parse_config(arguments: Sequence[str], command: str, description: str) -> Config:
    """The configuration that flags and `--config` files give; later ones win. `--help` prints and exits 0.

    Raises ConfigError, in one line, for an unknown key, a value of a wrong type or an unreadable file.
    """
    parser = ArgumentParser(
        prog=command, description=description, exit_on_error=False, default_env=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="YAML file of any of the keys below")
    for group in fields(Config):
        parser.add_class_arguments(_type_of(group.name), group.name)
    _check_files(arguments)
    try:
        parsed = parser.parse_args(list(arguments))
    except (ArgumentError, yaml.YAMLError, OSError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{one_line(error)} (see {command} --help)") from None
    except SystemExit as leaving:
        if leaving.code:
            raise ConfigError(f"wrong arguments (see {command} --help)") from None
        raise
    return _build(parsed)


def to_yaml(config: Config) -> str:
    """Every key with its value, in the order of the configuration."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def one_line(error: Exception) -> str:
    """The gist of a parser's message, which may run over many lines, as `key is value; give ...` where it says so."""
    text = str(error) or type(error).__name__
    key = re.match(r'Parser key "([^"]+)":', text)
    value = re.findall(r"(?:Got|Given) value: (.*)", text)
    types = re.search(r"(?:Subtypes: \[(.*)\]|Expected a (.+?)\. Got)", text)
    if key and value and types:
        return f"{key[1]} is {value[-1]}; give {_in_words(types[1] or types[2])}"
    lines = [line.strip(" -\t") for line in text.split("\n\n")[0].splitlines() if line.strip(" -\t")]
    gist = re.sub(r"\s+", " ", ": ".join(lines[:3]))[:400]
    return re.sub(r'^Parser key "([^"]+)":+ ?', r"\1: ", gist)


_WORDS = (  # the longer first
    ("dict[str | int, int | None]", "a map of raw value or colour to class"),
    ("list[int]", "a list of whole numbers [a,b]"),
    ("list[str]", "a list [a,b]"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("bool", "true or false"),
    ("str", "text"),
    ("NoneType", "null"),
)


def _in_words(types: str) -> str:
    """Python's names of types, as jsonargparse prints them, in a user's words."""
    text = re.sub(r"<class '(\w+)'>", r"\1", types)
    found = []
    for name, words in _WORDS:
        if name in text:
            text = text.replace(name, "")
            found.append(words)
    return " or ".join(found)


def _check_files(arguments: Sequence[str]) -> None:
    """Raise ConfigError, naming the file, for a `--config` that is no YAML map of groups and their keys."""
    words = [word.partition("=") for word in arguments]
    following = [*arguments[1:], ""]
    for (word, equals, value), after in zip(words, following, strict=False):
        if word == "--config" and (equals or after):
            _check_file(value if equals else after)


def _check_file(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}; give a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place} is not YAML: {getattr(error, 'problem', None) or error}; mend it") from None
    known = {group.name: {f.name for f in fields(_type_of(group.name))} for group in fields(Config)}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds {_kind(values)} instead of groups of keys; give some of {', '.join(known)}")
    for name, group in values.items():
        if name not in known:
            raise ConfigError(f"{path} has the unknown group '{name}'; give some of {', '.join(known)}")
        if not isinstance(group, Mapping):
            raise ConfigError(f"{path}: {name} holds {_kind(group)}; give keys below it, or leave it out")
        unknown = [key for key in group if key not in known[name]]
        if unknown:
            raise ConfigError(
                f"{path} has the unknown key {name}.{unknown[0]}; give some of {', '.join(sorted(known[name]))}"
            )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"the {type(value).__name__} {str(value)[:40]}"


def _type_of(group: str) -> Callable[..., Any]:
    return {f.name: f.default_factory for f in fields(Config)}[group]  # type: ignore[return-value]


def _build(parsed: Namespace) -> Config:
    groups = {}
    for group in fields(Config):
        values = parsed[group.name]
        groups[group.name] = _type_of(group.name)(**vars(values))
    return Config(**groups)
