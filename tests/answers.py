"""What a command answers; a refusal is one line that names what is wrong, both values, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

import pytest


def output_of(command: Callable[[], int]) -> str:
    """Run a command that ends with 0; return its standard output."""
    with redirect_stdout(StringIO()) as out:
        assert command() == 0
    return out.getvalue()


def errors_of(command: Callable[[], int]) -> str:
    """Run a command that ends with 0; return its standard error: progress and warnings."""
    with redirect_stderr(StringIO()) as err:
        assert command() == 0
    return err.getvalue()


@contextmanager
def refusal(error: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose text is one line with each of the words."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text


def check_line(err: str, *words: str) -> None:
    """Check that standard error is one line of the right form with each of the words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    assert [word for word in words if word not in err] == [], err
    assert len(err) < 700, err


def refuse(command: Callable[[], int], *words: str, code: int = 2) -> str:
    """Run a command that says nothing but such a line, and ends with `code`; return the line."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        ended = command()
    check_line(err.getvalue(), *words)
    assert (ended, out.getvalue()) == (code, "")
    return err.getvalue()
