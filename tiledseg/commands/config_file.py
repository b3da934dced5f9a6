"""Configurations from flags and YAML files (jsonargparse), to YAML (the run's `config.yaml`) and from JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from tiledseg.config.checks import AUTO, shown
from tiledseg.config.parallel import FOUND
from tiledseg.config.run import Config
from tiledseg.config.words import refuse_moved
from tiledseg.errors import ConfigError, WriteError
from tiledseg.system.console import answer
from tiledseg.user_files.yaml_text import ambiguity, check_keys, check_words, read_yaml

_GROUPS: dict[str, Any] = {group.name: group.default_factory for group in fields(Config)}
_KNOWN = {name: {key.name for key in fields(kind)} for name, kind in _GROUPS.items()}
_NUMBERS = {
    f"--{name}.{key.name}"
    for name, kind in _GROUPS.items()
    for key in fields(kind)
    if re.search("int|float", str(key.type))
}


class _Parser(ArgumentParser):
    """A parser whose help is an answer: argparse passes over what standard output does not take."""

    def _print_message(self, message: str, file: object = None) -> None:
        answer(message.rstrip("\n"))


def parse_config(arguments: Sequence[str], command: str, description: str) -> Config:
    """The configuration that flags and `--config` files give; later ones win. `--help` prints and exits 0.

    Raises ConfigError, in one line, for an unknown key, a value of a wrong type or an unreadable file.
    """
    check_words(arguments)
    in_files = _check_files(arguments)
    arguments = _auto_as_list(arguments)
    parser = _parser(command, description, _named(arguments, in_files))
    config = _parsed(lambda: parser.parse_args(list(arguments)), f"(see {command} --help)")
    # Not where a file says both: the record of a run names every key, with its default.
    if config.model.build is not None and any(word == "--model.name" for word, _ in _given(arguments)):
        raise ConfigError(
            f"--model.name is {config.model.name}, but {config.model.build} builds the network; leave one of them out"
        )
    return config


def as_config(values: Mapping[str, Any]) -> Config:
    """The configuration of groups of keys. Raises ConfigError as `parse_config` does."""
    if values.get("parallel") == AUTO:
        values = {**values, "parallel": {"auto": _left_to_find(_told(values))}}
    refuse_moved(_keys(values), "the configuration has ")
    check_keys("the configuration", values, _KNOWN)
    parser = _parser("tiledseg train", "", tuple(values))
    return _parsed(lambda: parser.parse_object(dict(values)), "(see docs/api.md)")


@cache
def _parser(command: str, description: str, groups: tuple[str, ...]) -> ArgumentParser:
    """Of the keys of `groups`. Made once: it keeps nothing of what it parses, and takes longer to make than a
    configuration to read."""
    parser = _Parser(prog=command, description=description, exit_on_error=False, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file of any of the keys below")
    for name in groups:
        parser.add_class_arguments(_GROUPS[name], name)
    return parser


def _named(arguments: Sequence[str], in_files: Collection[str]) -> tuple[str, ...]:
    """The groups that are given a value: others stay as they come, and need no parser. All, where help is asked for."""
    words = [word for word, _ in _given(arguments)]
    if {"-h", "--help"} & set(words):
        return tuple(_GROUPS)
    by_flags = {word.removeprefix("--").partition(".")[0] for word in words}
    return tuple(name for name in _GROUPS if name in by_flags or name in in_files)


def _parsed(parse: Callable[[], Namespace], see: str) -> Config:
    try:
        parsed = parse()
    except WriteError:
        raise  # of the help
    except (ArgumentError, yaml.YAMLError, OSError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{one_line(error)} {see}") from None
    except RecursionError:
        raise ConfigError(f"a value nests lists or maps too deep; no key needs that {see}") from None
    except SystemExit as leaving:
        if leaving.code:
            raise ConfigError(f"wrong arguments {see}") from None
        raise
    return Config(**{name: kind(**vars(parsed[name])) for name, kind in _GROUPS.items() if name in parsed})


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
        return f"{key[1]} is {shown(value[-1])}; give {_in_words(types[1] or types[2])}"
    lines = [line.strip(" -\t") for line in text.split("\n\n")[0].splitlines() if line.strip(" -\t")]
    gist = re.sub(r"\s+", " ", ": ".join(lines[:3]))[:400]
    return re.sub(r'^Parser key "([^"]+)":+ ?', r"\1: ", gist)


_WORDS = (  # the longer first
    ("dict[str | int, int | None]", "a map of raw value or colour to class"),
    ("dict[str | int, float]", "a map of class to weight"),
    ("dict[str, float]", "a map of name to number"),
    ("list[float]", "a list of numbers [a,b]"),
    ("list[int]", "a list of whole numbers [a,b]"),
    ("list[str]", "a list [a,b]"),
    ("list", "a list [a,b]"),
    ("dict", "a map of name to value"),
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


def _auto_as_list(arguments: Sequence[str]) -> Sequence[str]:
    """The same words with `--parallel auto`, and `parallel: auto` of a file, as the list of the keys that are found."""
    files = {path: read_yaml(path) for path in config_files(arguments)}
    said = [path for path, values in files.items() if values.get("parallel") == AUTO]
    pairs = _given(arguments)
    if not said and ("--parallel", AUTO) not in pairs:
        return arguments
    if any(word == "--parallel.auto" for word, _ in pairs):
        raise ConfigError("--parallel.auto is given beside --parallel auto, which sets it; leave one of them out")
    given: dict[str, bool] = {}
    for word, value in pairs:  # the later wins
        group, _, key = word.removeprefix("--").partition(".")
        told = {group: yaml.safe_load(value) if word == "--parallel" else {key: value}}
        given |= _told(files.get(value, {}) if word == "--config" else told)
    words = []
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in ("--config", "--parallel"):
            words.append(word)
            continue
        value = value if equals else next(rest, "")
        left = {key: group for key, group in files.get(value, {}).items() if key != "parallel"}
        if name == "--config" and value in said:
            words += [f"--config={yaml.safe_dump(left)}"] if left else []
        elif value != AUTO:
            words.append(f"{name}={value}")
    return [*words, f"--parallel.auto=[{','.join(_left_to_find(given))}]"]


def _told(values: Mapping[str, Any]) -> dict[str, bool]:
    """Of each key of groups, "group.key", whether it is given a value, and not one that another run has found."""
    parallel = values.get("parallel")
    auto = parallel.get("auto") if isinstance(parallel, Mapping) else None
    found = auto if isinstance(auto, list) else ()
    return {
        f"{group}.{key}": value != AUTO and f"{group}.{key}" not in found
        for group, keys in values.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }


def _left_to_find(given: Mapping[str, bool]) -> list[str]:
    """What `parallel: auto` finds beside keys that are given; `memory.recompute` says `parallel.recompute` too."""
    both = {**given, "parallel.recompute": given.get("parallel.recompute") or given.get("memory.recompute")}
    found = [name for name in FOUND if not both.get(name)]
    if not found:
        raise ConfigError(f"parallel is auto, but all that could be found is given: {', '.join(FOUND)}; leave one out")
    return found


def _keys(values: Any) -> list[str]:
    """Return the keys of groups as "group.key", as far as a file has such."""
    groups = values.items() if isinstance(values, Mapping) else ()
    return [f"{group}.{key}" for group, keys in groups if isinstance(keys, Mapping) for key in keys]


def config_files(arguments: Sequence[str]) -> list[str]:
    return [given for word, given in _given(arguments) if word == "--config" and given]


def _given(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with what is given to it: after its `=`, else by the following word."""
    words = [word.partition("=") for word in arguments]
    following = [*arguments[1:], ""]
    return [(word, value if equals else after) for (word, equals, value), after in zip(words, following, strict=False)]


def _check_files(arguments: Sequence[str]) -> set[str]:
    """The groups that the files of `--config` hold. Raises ConfigError, naming the file, for one that is no YAML map of
    groups and their keys.

    The parser would read the file of `--data FILE` by itself, unchecked: a group has to be written out.
    """
    found: set[str] = set()
    for path in config_files(arguments):
        values = read_yaml(path)
        if isinstance(values, Mapping) and values.get("parallel") == AUTO:
            values = {**values, "parallel": {}}
        refuse_moved(_keys(values), f"{path} has ")
        found |= check_keys(path, values, _KNOWN).keys()
    refuse_moved([word.removeprefix("--") for word, _ in _given(arguments)], "--")
    for word, given in _given(arguments):
        if word in _NUMBERS and (words := ambiguity(given)):
            raise ConfigError(f"{word} is {words}")
        short = (word, given) == ("--parallel", AUTO)
        if word.startswith("--") and word[2:] in _KNOWN and not given.lstrip().startswith("{") and not short:
            raise ConfigError(f"{word} takes a map of keys, not '{shown(given)}'; give {word}.KEY, or --config FILE")
    return found
