"""Commands and pieces of Python, one after the other in one process: starting one costs more than a tiny run.

Run as `python -m tests.pretend_gpu.session JSON`, a list of [name, command, arguments, Event.query's answer]. Prints a
line of JSON for each: its name, its status, and how often the host waited, by kind and place.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def run(commands: list[tuple[str, str, list[str], str]]) -> None:
    gpu: Any = import_module("tests.pretend_gpu.device") if "PRETEND_GPU" in os.environ else None
    from tiledseg.memory import offload
    from tiledseg.training import run_journal as journal
    from tiledseg.training import run_page as page

    offload.LEAST = 1  # these networks have no large tensors
    journal.plot_progress = page.write_report = lambda *given: True  # type: ignore[assignment]
    for name, command, arguments, query in commands:
        os.environ["PYTEST_CURRENT_TEST"] = name
        waits: list[Any] = []
        if gpu:
            gpu.waits.clear()
            gpu.query = query
        status = import_module(f"tiledseg.{command}").main(arguments)
        if gpu:
            waits = [[f"{kind} at {place}", count] for (kind, place), count in gpu.waits.items()]
        print(json.dumps([name, status, waits]), flush=True)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
