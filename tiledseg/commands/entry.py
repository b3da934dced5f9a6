"""Start and end of a process: one way for `tiledseg X` and `python -m tiledseg.X`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from tiledseg.system.signals import listen

_OF_TORCH = ("TORCH", "PYTORCH")  # how the names of its variables begin


def enter(module: str) -> NoReturn:
    """Take signals, import `module`, which takes a while, run its `main`, and end the process with its exit code."""
    listen()
    names = sorted(name for name in os.environ if name.startswith(_OF_TORCH))
    refusal = _refusal_of_torch(names) if names else None
    if refusal is None:
        code = importlib.import_module(module).main()
    else:
        code = importlib.import_module("tiledseg.commands.parser").run(lambda: _raise(refusal))
    leave: Callable[[int], NoReturn] = importlib.import_module("tiledseg.comm.session").leave
    leave(code)


def _refusal_of_torch(names: Sequence[str]) -> Exception | None:
    """Import torch, which reads its variables meanwhile; return a ConfigError where it refuses one of them.

    A signal still ends the process at once: `run`, which a process calls once, has not begun.
    """
    try:
        importlib.import_module("torch.distributed")
    except ImportError:
        return None  # the command says so, where it needs torch
    except Exception as error:
        from tiledseg.errors import ConfigError, first_line

        said, values = str(error), {name: os.environ[name] for name in names}
        named = [name for name, value in values.items() if name in said or (value[1:] and value in said)] or names
        given = " or ".join(f"{name}={values[name]!r}" for name in named)
        return ConfigError(f"torch refuses {given} in the environment ({first_line(error)}); unset it")
    return None


def _raise(error: Exception) -> NoReturn:
    raise error
