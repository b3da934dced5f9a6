"""Stand-ins of packages that public networks import, and do not use: timm imports torchvision for its transforms."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

STAND_INS = ("torchvision", "huggingface_hub", "tqdm")


class Anything(type):
    """The class of stand-ins of classes, which have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {"__new__": lambda cls, *_, **__: object.__new__(cls), "__init_subclass__": _ignored})


def _ignored(cls: type, **_: Any) -> None:
    """Take what a subclass is declared with."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder of modules that stand in for absent packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _anything  # type: ignore[method-assign]


@contextmanager
def stand_ins() -> Iterator[None]:
    """Absent packages can be imported within, and are absent again afterwards."""
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if getattr(module, "__loader__", None) is finder]:
            del sys.modules[name]
