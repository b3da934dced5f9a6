"""What a refusal looks like."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bad_input.case import Case
from tests.small_files import tree


def command(case: Case) -> Callable[[Sequence[str]], int]:
    """The `main` of the case's command."""
    return importlib.import_module(f"tiledseg.{case.command}").main


@contextmanager
def check_refusal(case: Case, root: Path, capfd: pytest.CaptureFixture[str], speaks: bool = True) -> Iterator[None]:
    """The body leaves everything below `root` as it was and, where it `speaks`, one line that says what is wrong."""
    before = tree(root)
    capfd.readouterr()
    yield
    out, err = capfd.readouterr()
    assert out == ""
    check_line(case, err) if speaks else silent(err)
    assert tree(root) == before


def check_line(case: Case, err: str) -> None:
    """Standard error is one line of the right form with the case's words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    missing = [word for word in case.words if word not in err]
    assert not missing, f"{missing} not in {err!r}"
    assert len(err) < 700, err


def silent(err: str) -> None:
    """Nothing was said."""
    assert err == ""
