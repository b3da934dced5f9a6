"""What the battery writes: one JSON object a line, at once, so that a machine that dies leaves what was measured.

Keys of a line: `part`, `name`, `state` (ok, failed, skipped), `value` and `unit` where ok, `reason` where not, and the
`seconds` that the measurement took.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "measurements.jsonl"


def write_line(folder: Path, part: str, name: str, state: str, seconds: float, **found: Any) -> None:
    """Appends one line by one write, so that lines of several processes do not mix, and shows it."""
    line = {"part": part, "name": name, "state": state, **found, "seconds": round(seconds, 3)}
    text = json.dumps(line, default=str) + "\n"
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
    print(text, end="", flush=True)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """All lines that were written so far."""
    path = folder / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one_line(error: BaseException) -> str:
    """The class and the first line of the message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:500]
