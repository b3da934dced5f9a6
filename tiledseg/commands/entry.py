"""How a process becomes a program, and ends: one way for `tiledseg X` and `python -m tiledseg.X`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NoReturn

from tiledseg.system.signals import listen


def enter(module: str) -> NoReturn:
    """Take signals, import `module`, which takes a while, run its `main`, and end the process with its exit code."""
    listen()
    code = importlib.import_module(module).main()
    leave: Callable[[int], NoReturn] = importlib.import_module("tiledseg.comm.session").leave
    leave(code)
