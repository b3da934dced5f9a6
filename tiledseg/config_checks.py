"""Checks of single values of a configuration: each names the key and what it may be."""

from __future__ import annotations

import re

from tiledseg.errors import ConfigError


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError where `value` is none of the words that are known."""
    if value not in known:
        raise ConfigError(f"{key} is '{value}'; give one of {', '.join(known)}")


def at_least(key: str, value: float, least: float) -> None:
    """Raise ConfigError where `value` is less than it may be."""
    if value < least:
        raise ConfigError(f"{key} is {value}; give at least {least}")


def counts_of(text: str) -> tuple[int, ...] | None:
    """Whole numbers of '[14,24,30]', '{14,24,30}' (as papers write a balance) or '14,24,30'; None for other text."""
    inner = re.fullmatch(r"\s*(?:\[(.*)\]|\{(.*)\}|([^\[\]{}]*))\s*", text)
    words = next((part for part in inner.groups() if part is not None), "").split(",") if inner else []
    if not words or not all(re.fullmatch(r"\s*[+-]?\d+\s*", word) for word in words):
        return None
    return tuple(map(int, words))
