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
    """A YAML loader without dates: 2024-06-20 is text, like 2024-06. It refuses, before a value is built, what
    configurations do not need."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        sign: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        plain = event.value if isinstance(event, yaml.ScalarEvent) and event.style is None else ""
        if event.anchor:
            words = "uses an alias or an anchor (* or &), which no configuration needs; write it out, or quote it"
            raise _RefusedError(words, event.start_mark)
        if _LONG_NUMBER.fullmatch(plain):
            raise _RefusedError(f"holds a number of {len(plain)} characters; no key needs that", event.start_mark)
        if words := ambiguity(plain):
            raise _RefusedError(f"holds {words}", event.start_mark)
        if self.depth > DEEPEST:
            raise _RefusedError(f"nests lists and maps more than {DEEPEST} deep; no key needs that", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise _RefusedError("merges a map with <<, which configurations do not; write it out", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise _RefusedError(f"gives the key '{key.value[:40]}' a second time; keep one of them", key.start_mark)
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> Any:
    """Read the YAML file `path`. Raise ConfigError, naming the file and the line."""
    text = read_text(path, "the configuration", LARGEST_BYTES, "give a YAML file", ConfigError)
    try:
        return yaml.load(text, _Loader)
    except _RefusedError as error:
        raise ConfigError(f"{path}{error.place} {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        words = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        raise ConfigError(f"{path}{place} is not YAML: {words or error}; mend it") from None
    except ValueError as error:  # a number of thousands of digits, 0x without one
        raise ConfigError(f"{path} holds a value that cannot be: {error}; mend it") from None


def load_value(text: str) -> Any:
    """Return the YAML value of a flag; text that is no YAML stays text, which its key checks. Raise ConfigError for
    lists and maps with aliases, a key given twice or deep nesting."""
    try:
        return yaml.load(text, _Loader)
    except _RefusedError as error:
        if any(sign in text for sign in "[{\n") or _LONG_NUMBER.fullmatch(text):
            raise ConfigError(f"{text[:40]!r} {error}") from None
    except (yaml.YAMLError, ValueError):
        pass
    return text


def ambiguity(number: str) -> str:
    """Return a message on a number that YAML reads differently from people (010 is 8, 1:30 is 90), else an empty
    one."""
    if not _OTHER_BASE.fullmatch(number):
        return ""
    return f"{number}, which YAML takes for {yaml.safe_load(number)}; write it plainly, or quote it"
