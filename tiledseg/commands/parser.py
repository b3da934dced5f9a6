"""The argument parser of the commands, with errors of one line, and exit codes. Standard library only."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from types import ModuleType
from typing import IO, Any, NoReturn

from tiledseg.comm.failure import exit_code, report_before_mesh
from tiledseg.comm.launch import SERIAL, Launch, detect
from tiledseg.errors import ConfigError
from tiledseg.system.console import answer, answering, keep_descriptors, say
from tiledseg.system.files import allow_open_files
from tiledseg.system.signals import Stopped, ending, listening, swallowed


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # names of pages stay whole


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors, without abbreviations; rank 0 alone prints its help."""

    def __init__(self, prog: str, example: str = "", main: Collection[str] = (), **options: Any) -> None:
        """`example`: flags shown as an example. `main`: flags shown by --help (none: all); `--help all` shows all."""
        self.example, self.main = example, main
        super().__init__(prog, **{"allow_abbrev": False, "formatter_class": _Formatter, **options})
        self.set_defaults(command=prog, flags={})

    def format_help(self) -> str:
        """Return the help: required flags, purpose, options, an example."""
        if self.usage is None:
            needed = (f"{each.option_strings[0]} {each.dest.upper()} " for each in self._actions if each.required)
            self.usage = f"{self.prog} {''.join(needed)}[FLAG ...]"
        for each in self._actions if self.main else ():
            each.help = each.help if each.option_strings[0] in self.main else argparse.SUPPRESS
        more = f"\n{self.prog} --help all: {len(self._actions)} flags\n" if self.main else ""
        return super().format_help() + more + (f"\nexample:\n  {self.prog} {self.example}\n" if self.example else "")

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError in one line that names the command, and the known flag most similar to an unknown one."""
        if message.startswith("unrecognized arguments: --"):
            import difflib

            flag = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            keys = [key for key in self._option_string_actions if flag_of(key[2:]) == flag.replace("_", "-")]
            like = keys or difflib.get_close_matches(flag, self._option_string_actions, 1, 0.8)
            message += f"; did you mean {like[0]}?" if like else ""
        raise ConfigError(f"{' '.join(message.split())} (see {self.prog} --help)")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if own_launch().is_root:
            answer(message.rstrip("\n"))  # argparse ignores errors of standard output


def command(body: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """Wrap a command's body, a function of words: it takes the process's by default, and returns its exit code."""

    @wraps(body)
    def main(words: Sequence[str] | None = None) -> int:
        return run(lambda: body(sys.argv[1:] if words is None else words))

    return main


def run(body: Callable[[], int | None]) -> int:
    """Call `body` and return the exit code: its own (None: 0), 2 for bad input, 75 if a signal has stopped it, 1 for
    any other failure, such as an answer that cannot be written to standard output.

    A failure is printed as one line `error: ...` on standard error; by rank 0 only if all ranks have the same one. A
    traceback follows on request (`failure.report`).
    """
    keep_descriptors()
    with listening():
        code = _run(body)
        ending(code)
    return code


def _run(body: Callable[[], int | None]) -> int:
    try:
        allow_open_files()
        try:
            code = body() or 0
        except SystemExit as error:
            code = exit_code(error)
        if code == 0:
            with answering():  # flush output not printed by `console.answer`, such as a parser's help
                pass
        return code
    except (Exception, KeyboardInterrupt, Stopped) as met:
        fault = swallowed() or met
        report_before_mesh(fault, own_launch(), socket.gethostname())
        return exit_code(fault)


def flag_of(name: str) -> str:
    """Return the flag of an option, or of a key without its group."""
    return f"--{name.rpartition('.')[2].replace('_', '-')}"


def refuse_given(flags: argparse.Namespace, names: Iterable[str], because: str, remedy: str = "leave it out") -> None:
    """Raise ConfigError for the first of the options `names` that is given."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and value is not False:
            text = " ".join(map(str, value)) if isinstance(value, list) else "given" if value is True else value
            raise ConfigError(f"{flag_of(name)} is {text}, but {because}; {remedy}")


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        say(f"warning: {line}")


def own_launch() -> Launch:
    """Return this process's place in its job; a serial launch if the launcher's variables are inconsistent."""
    try:
        return detect(os.environ)
    except ConfigError:
        return SERIAL


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Make a command's module callable as its function: importing the module hides a function of the same name."""
    vars(sys.modules[module])["__wrapped__"] = function  # gives the module the function's signature and docstring
    sys.modules[module].__class__ = _Command


class _Command(ModuleType):
    """A callable module of a command: `tiledseg.plan(...)`."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


def add_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table", help="answer's form (default table)")
