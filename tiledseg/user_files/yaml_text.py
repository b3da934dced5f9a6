"""The YAML of configurations: one document, no aliases, each key once, little nesting, at most 1 MiB.

Other YAML is refused, because it can hang a reader (a FIFO, aliases that multiply), exhaust the stack (nesting), or
lose values (a key given twice).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tiledseg.errors import ConfigError
from tiledseg.system.files import read_text

DEEPEST = 16
LARGEST_BYTES = 2**20
_LONG_NUMBER = re.compile(r"[-+]?(0[xXob])?[0-9a-fA-F_]{300,}")  # too long for any float
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # octal, or minutes and seconds


class _RefusedError(Exception):
    """A fault with its remedy, and the line (from 1) of the file."""

    def __init__(self, words: str, mark: Any) -> None:
        super().__init__(words)
        self.place = f", line {mark.line + 1}"


class _Loader(yaml.SafeLoader):
    """A YAML loader without dates: 2024-06-20 is text, like 2024-06. Each key stands once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        sign: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise _RefusedError("merges a map with <<, which configurations do not; write it out", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise _RefusedError(f"gives the key '{key.value[:40]}' a second time; keep one of them", key.start_mark)
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


def _load(text: str) -> Any:
    """Return the value of a text. Raise _RefusedError for YAML that configurations do not need, before it is built."""
    depth = documents = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        plain = event.value if isinstance(event, yaml.ScalarEvent) and event.style is None else ""
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        words = f"holds {doubt}" if (doubt := ambiguity(plain)) else ""
        if documents > 1:
            words = "starts a second document, which would be left out; keep one"
        if getattr(event, "anchor", None):
            words = "uses an alias or an anchor (* or &), which no configuration needs; write it out, or quote it"
        if _LONG_NUMBER.fullmatch(plain):
            words = f"holds a number of {len(plain)} characters; no key needs that"
        if depth > DEEPEST:
            words = f"nests lists and maps more than {DEEPEST} deep; no key needs that"
        if words:
            raise _RefusedError(words, event.start_mark)
    return yaml.load(text, _Loader)


def read_yaml(path: str) -> Any:
    """Read the YAML file `path`. Raise ConfigError, naming the file and the line."""
    text = read_text(path, "the configuration", LARGEST_BYTES, "give a YAML file", ConfigError)
    try:
        return _load(text)
    except _RefusedError as error:
        raise ConfigError(f"{path}{error.place} {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place} is not YAML: {getattr(error, 'problem', None) or error}; mend it") from None
    except ValueError as error:  # a number of thousands of digits, 0x without one
        raise ConfigError(f"{path} holds a value that cannot be: {error}; mend it") from None


def load_value(text: str) -> Any:
    """Return the YAML value of a flag; text that is no YAML stays text. Raise ConfigError for aliases, a key given
    twice or deep nesting."""
    try:
        strict = any(sign in text for sign in "[{\n") or _LONG_NUMBER.fullmatch(text)
        return _load(text) if strict else yaml.load(text, _Loader)
    except _RefusedError as error:
        raise ConfigError(f"{text[:40]!r} {error}") from None
    except (yaml.YAMLError, ValueError):
        return text  # checked by its key


def ambiguity(number: str) -> str:
    """Return a message on a number that YAML reads differently from people (010 is 8, 1:30 is 90), else an empty
    one."""
    if not _OTHER_BASE.fullmatch(number):
        return ""
    return f"{number}, which YAML takes for {yaml.safe_load(number)}; write it plainly, or quote it"
