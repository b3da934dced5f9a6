"""How often this process opens the files of a folder: by Python, and by safetensors, which Python does not see."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors


def opens(folder: Path, work: Callable[[], object]) -> Counter[str]:
    """Of each file, by its name, while `work` runs. Not by inotify, which makes one of opens that follow each other."""
    found: Counter[str] = Counter()
    hears = True

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if hears and event == "open" and isinstance(given[0], str | bytes | os.PathLike):
            where = Path(os.path.realpath(os.fsdecode(given[0])))
            found.update([where.name] if where.parent == folder.resolve() else [])

    def safe_open(path: object, *given: Any, **named: Any) -> Any:
        hear("open", (path,))
        return safetensors.safe_open(path, *given, **named)

    sys.addaudithook(hear)  # Python takes no hook back
    with mock.patch("safetensors.torch.safe_open", safe_open):
        work()
    hears = False
    return found
