"""Every command ends in the same way: one line, code 2 for bad input and 1 for a fault, a traceback where asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.comm.launching import clean_environment
from tiledseg.comm.failure import describe, traced
from tiledseg.commands.parser import Parser, add_format_option, run
from tiledseg.errors import CommunicationError, ConfigError, RasterError, TiledsegError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, whoever started pytest."""
    kept = clean_environment()
    for name in [name for name in os.environ if name not in kept]:
        monkeypatch.delenv(name)


def raising(error: BaseException):
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    "error", [ConfigError("grid 8 is too fine: use 4"), RasterError("a.tif is missing\n  twice")], ids=["one", "two"]
)
def test_bad_input_is_one_line(error: TiledsegError, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(error)) == 2
    assert capsys.readouterr() == ("", f"error: {' '.join(str(error).split())}\n")


HINT = " (unforeseen; TILEDSEG_TRACEBACK=1 shows where)"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ZeroDivisionError("by zero"), f"error: ZeroDivisionError: by zero{HINT}"),
        (AssertionError(), f"error: AssertionError{HINT}"),
        (MemoryError(), f"error: MemoryError{HINT}"),
        (RecursionError("too deep"), f"error: RecursionError: too deep{HINT}"),
        (OverflowError("two\nlines"), f"error: OverflowError: two lines{HINT}"),
        (CommunicationError("rank 0 is gone"), "error: rank 0 is gone"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_fault_is_one_line_too(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(error)) == 1
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), ConfigError("grid 8"), CommunicationError("gone")])
def test_the_traceback_follows_where_it_is_asked_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def marked() -> int:
        with traced(True):
            raise error

    for body, said in ((raising(error), "1"), (marked, "0")):
        monkeypatch.setenv("TILEDSEG_TRACEBACK", said)
        run(body)
        written = capsys.readouterr().err
        assert written.startswith(f"error: {describe(error)}\nTraceback (most recent call last):\n")
        assert written.count("error: ") == 1
        vars(error).clear()


def test_a_message_of_any_length_is_a_line_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Its start and its end, where the remedy stands; names of files that are no text among it."""
    assert run(raising(ConfigError("key is " + 9999 * "x" + "\udcff; give less"))) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: key is xxx")
    assert written.endswith("xxx\\udcff; give less\n")
    assert len(written) < 700


def test_an_interrupt_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def parser() -> Parser:
    made = Parser(prog="python -m tiledseg.thing")
    made.add_argument("--size", type=int, required=True)
    add_format_option(made)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --size"),
        (["--size", "x"], "argument --size: invalid int value: 'x'"),
        (["--siz", "3"], "the following arguments are required: --size"),
        (["--size", "3", "--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["--size", "3", "4"], "unrecognized arguments: 4"),
    ],
)
def test_wrong_flags_name_the_help(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(arguments)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("(see python -m tiledseg.thing --help)")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_help_is_rank_0s(
    rank: str, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert run(lambda: parser().parse_args(["--help"]) and 0) == 0
    assert capsys.readouterr().out.startswith("usage: python -m tiledseg.thing") == printed


def test_the_helper_needs_the_standard_library_only() -> None:
    """plan imports it on login nodes and must answer in half a second, which any of these takes by itself."""
    script = "import sys, tiledseg.commands.parser; print(sorted({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=clean_environment(), check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    script = f"{sys.executable} -m tiledseg.plan --size 10000 --grid 8 | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(("name", "value"), [("TORCH_LOGS_OUT", "/none/x"), ("TORCH_DISTRIBUTED_DEBUG", "often")])
def test_a_setting_that_torch_refuses_is_one_line(name: str, value: str) -> None:
    command = [sys.executable, "-m", "tiledseg", "plan", "--size", "10000", "--grid", "8"]
    environ = {**os.environ, name: value}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: torch refuses {name}='{value}' in the environment (")
    assert done.stderr.count("\n") == 1
