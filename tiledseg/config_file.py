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
    parser = ArgumentParser(prog=command, description=description, exit_on_error=False, default_env=False)
    parser.add_argument("--config", action="config", help="YAML file of any of the keys below")
    for group in fields(Config):
        parser.add_class_arguments(_type_of(group.name), group.name)
    try:
        parsed = parser.parse_args(list(arguments))
    except (ArgumentError, yaml.YAMLError, OSError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{one_line(error)} (see {command} --help)") from None
    except SystemExit as leaving:
        if leaving.code:
            raise ConfigError(f"wrong arguments (see {command} --help)") from None
        raise
    return _build(parsed)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The configuration that `dataclasses.asdict` took apart; raises ConfigError for a key it does not know."""
    try:
        return Config(**{name: _type_of(name)(**group) for name, group in values.items()})
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the configuration holds a key that this program does not know: {error}") from None


def to_yaml(config: Config) -> str:
    """Every key with its value, in the order of the configuration."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def one_line(error: Exception) -> str:
    """The gist of a parser's message, which may run over many lines, with its own advice cut off."""
    text = str(error) or type(error).__name__
    text = text.split("\n\n")[0]
    lines = [line.strip(" -\t") for line in text.splitlines() if line.strip(" -\t")]
    gist = re.sub(r"\s+", " ", ": ".join(lines[:3]))[:400]
    gist = re.sub(r'^Parser key "([^"]+)":+ ?', r"\1: ", gist)
    return re.sub(r"<class '(\w+)'>", r"\1", gist)


def _type_of(group: str) -> Callable[..., Any]:
    return {f.name: f.default_factory for f in fields(Config)}[group]  # type: ignore[return-value]


def _build(parsed: Namespace) -> Config:
    groups = {}
    for group in fields(Config):
        values = parsed[group.name]
        groups[group.name] = _type_of(group.name)(**vars(values))
    return Config(**groups)
