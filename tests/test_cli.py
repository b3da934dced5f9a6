"""One door: `tiledseg COMMAND`, `python -m tiledseg COMMAND` and `python -m tiledseg.COMMAND` are one command."""

from __future__ import annotations

import configparser
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.test_signals import program, signalled
from tiledseg.cli import COMMANDS, main
from tiledseg.version import VERSION


def console_script() -> str:
    """What the installed script `tiledseg` does, as pip writes it from setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, module, function = settings["options.entry_points"]["console_scripts"].replace("=", ":").split(":")
    assert name.strip() == "tiledseg"
    return f"import sys\nfrom {module.strip()} import {function} as main\nsys.exit(main())"


def forms(command: Sequence[str]) -> list[list[str]]:
    return [
        ["-m", f"tiledseg.{command[0]}", *command[1:]],
        ["-m", "tiledseg", *command],
        ["-c", console_script(), *command],
    ]


def ended(words: Sequence[str], redirected: str = "") -> tuple[int, str, str]:
    line = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, *words]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=clean_environment()
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "redirected", "code"),
    [(["plan", "--help"], "", 0), (["plan", "--sizee", "1000"], "", 2), (["plan", "--size", "1000"], "> /dev/full", 1)],
    ids=["help", "bad input", "full disk"],
)
def test_all_forms_are_one(command: Sequence[str], redirected: str, code: int) -> None:
    """The same answer, the same words and the same exit code."""
    first, *others = [ended(words, redirected) for words in forms(command)]
    assert first[0] == code
    assert others == [first, first]
    assert first[2].count("\n") == (1 if code else 0)


def test_a_signal_among_the_imports_is_75_in_every_form() -> None:
    for words in forms(["doctor"])[1:]:
        process = (
            program(*words[1:])
            if words[0] == "-m"
            else subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE, text=True
            )
        )
        assert signalled(process, signal.SIGUSR1, 0.0) == (75, "")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiledseg {VERSION}\n"


def test_the_commands_are_the_modules_that_run() -> None:
    runnable = {path.stem for path in (ROOT / "tiledseg").glob("*.py") if "\nif __name__ ==" in path.read_text()}
    assert runnable - {"__main__"} == set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian", "--help"], "there is no command 'trian'; give train (see tiledseg --help)"),
        (["pln"], "there is no command 'pln'; give plan (see tiledseg --help)"),
        (["--size", "3"], "unrecognized arguments: --size 3 (see tiledseg --help)"),
        ([], f"give a command: {', '.join(COMMANDS)} (see tiledseg --help)"),
        (["zzz"], f"there is no command 'zzz'; give one of {', '.join(COMMANDS)} (see tiledseg --help)"),
    ],
)
def test_no_such_command_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")
