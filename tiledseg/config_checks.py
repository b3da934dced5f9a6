"""Checks of single values of a configuration: each names the key and what it may be."""

from __future__ import annotations

from tiledseg.errors import ConfigError


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError where `value` is none of the words that are known."""
    if value not in known:
        raise ConfigError(f"{key} is '{value}'; give one of {', '.join(known)}")


def at_least(key: str, value: float, least: float) -> None:
    """Raise ConfigError where `value` is less than it may be."""
    if value < least:
        raise ConfigError(f"{key} is {value}; give at least {least}")
