"""The start and end of a process, for `tiledseg X` and `python -m tiledseg.X`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from tiledseg.system.signals import listen

_OF_TORCH = ("TORCH", "PYTORCH")  # prefixes of torch's environment variables


def enter(module: str) -> NoReturn:
    """Listen to signals, import `module`, run its `main`, and end the process with its exit code."""
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
    """Import torch, which reads its variables; return a ConfigError if it refuses one of them.

    A signal still ends the process at once, because `run` has not begun.
    """
    try:
        importlib.import_module("torch.distributed")
    except ImportError:
        return None  # a command that needs torch raises the error
    except Exception as error:
        from tiledseg.errors import ConfigError, first_line

        message, values = str(error), {name: os.environ[name] for name in names}
        named = [name for name, value in values.items() if name in message or (value[1:] and value in message)] or names
        pairs = " or ".join(f"{name}={values[name]!r}" for name in named)
        return ConfigError(f"torch refuses {pairs} in the environment ({first_line(error)}); unset it")
    return None


def _raise(error: Exception) -> NoReturn:
    raise error
