"""What validations have left in a run's folder: figures and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiledseg.system.outputs import VALIDATION
from tiledseg.training.run_folder.validations import read_validations


def check_validations(found: Path, expected: Path) -> None:
    """The same counts and the same pictures, to the last one."""
    mine, theirs = figures(found), figures(expected)
    assert mine == theirs
    assert mine
    assert all(len(each["panel"]) == 4 for each in mine)
    for path in sorted((expected / VALIDATION).glob("*.png")):
        assert (found / VALIDATION / path.name).read_bytes() == path.read_bytes(), path.name


def figures(folder: Path) -> list[dict[str, Any]]:
    """Of every validation, but for the loss, which is a sum of fractions, and the time."""
    return [{k: v for k, v in each.items() if k not in ("loss", "seconds")} for each in read_validations(folder)]
