"""A benchmark of several parts: each prints its tables and leaves its figures, in the end in one file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tiledseg.errors import TiledsegError

Part = Callable[[argparse.Namespace], tuple[str, Any]]  # the tables as text, and the figures


def run_parts(options: argparse.Namespace, programs: Mapping[str, Part], heading: str | None = None) -> int:
    """The exit code. `options.parts` are run in turn; `options.json` (None: none) is written whatever happens."""
    found: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    if heading:
        print(heading, flush=True)
    try:
        for part in options.parts:
            tables, found[part] = programs[part](options)
            print(f"\n{tables}", flush=True)
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        found["load_after"] = os.getloadavg()[0]
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nload {found['machine']['load_before']:.1f} before, {found['load_after']:.1f} after")
    return 0


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as the system tells."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
