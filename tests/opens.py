"""How often this process opens the files of a folder: by Python, and by safetensors, which Python does not see."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors

_hearing: list[Callable[[object], None]] = []


def opens(folder: Path, work: Callable[[], object]) -> Counter[str]:
    """Of each file, by its name, while `work` runs. Not by inotify, which makes one of opens that follow each other."""
    found: Counter[str] = Counter()

    def hear(path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            where = Path(os.path.realpath(os.fsdecode(path)))
            found.update([where.name] if where.parent == folder.resolve() else [])

    def safe_open(path: object, *given: Any, **named: Any) -> Any:
        hear(path)
        return safetensors.safe_open(path, *given, **named)

    _listen()
    _hearing.append(hear)
    try:
        with mock.patch("safetensors.torch.safe_open", safe_open):
            work()
    finally:
        _hearing.remove(hear)
    return found


@cache
def _listen() -> None:
    """Once a process: Python takes no hook back."""

    def tell(event: str, given: tuple[object, ...]) -> None:
        if event == "open":
            for hear in _hearing:
                hear(given[0])

    sys.addaudithook(tell)
