"""Every command ends alike, by each of its doors: one line, code 2 for bad input and 1 for a fault, and a traceback if
asked for. An answer that standard output does not take is a fault, a warning lost is nothing.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.comm.launching import PACKAGE, ROOT, clean_environment
from tests.crash.runs import Material
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.cli import COMMANDS, main
from tiledseg.comm.failure import describe
from tiledseg.commands.options import GROUPS, KEYS
from tiledseg.commands.parser import run
from tiledseg.errors import VERSION, CommunicationError, ConfigError, RasterError
from tiledseg.raster.tile_store import is_tile_store


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


FULL = "error: cannot write standard output: No space left on device; make room, then run the command again\n"
HINT = " (unforeseen; TILEDSEG_TRACEBACK=1 shows where)"


@pytest.mark.parametrize("traceback", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("grid 8 is too fine: use 4"), 2, "grid 8 is too fine: use 4"),
        (RasterError("a.tif is missing\n  twice"), 2, "a.tif is missing twice"),
        (CommunicationError("rank 0 is gone"), 1, "rank 0 is gone"),
        (ZeroDivisionError("by zero"), 1, f"ZeroDivisionError: by zero{HINT}"),
        (MemoryError(), 1, f"MemoryError{HINT}"),
        (OverflowError("two\nlines"), 1, f"OverflowError: two lines{HINT}"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_a_traceback_where_it_is_asked_for(
    error: Exception,
    code: int,
    line: str,
    traceback: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if traceback:
        monkeypatch.setenv("TILEDSEG_TRACEBACK", "1")
    assert run(raising(error)) == code
    first, *more = capsys.readouterr().err.splitlines()
    assert first == f"error: {describe(error) if traceback else line}"
    assert more[:1] == ["Traceback (most recent call last):"] * traceback
    assert "error: " not in "".join(more)


def test_a_message_of_any_length_is_a_line_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Its start and its end, where the remedy stands; names of files that are no text among it."""
    assert run(raising(ConfigError("key is " + 9999 * "x" + "\udcff; give less"))) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: key is xxx")
    assert written.endswith("xxx\\udcff; give less\n")
    assert len(written) < 700


def test_a_terminal_has_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file or a pipe, each message is one line."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = "/a/" + 90 * "p"
    assert run(raising(ConfigError(f"{path} is no file, " + 20 * "but something else, " + "so give another one"))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if len(line) > 80] == [f"  {path}"]
    assert len(lines) == 8


def test_an_interrupt_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_help_is_rank_0s(
    rank: str, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["plan", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tiledseg plan") == printed


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    script = f"{sys.executable} -m tiledseg.plan --help | head -n 1"
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


def forms(command: Sequence[str]) -> list[list[str]]:
    return [
        ["-m", f"tiledseg.{command[0]}", *command[1:]],
        ["-m", "tiledseg", *command],
        ["-c", "from tiledseg.cli import enter; enter()", *command],  # as the script of setup.cfg does
    ]


def ended(words: Sequence[str], redirected: str = "") -> tuple[int, str, str]:
    line = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, *words]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=clean_environment()
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("command", "redirected", "code"), [("--sizee", "", 2), ("--help", "> /dev/full", 1)])
def test_all_forms_are_one(command: str, redirected: str, code: int) -> None:
    """The same words and the same exit code."""
    first, *others = [ended(words, redirected) for words in forms(["plan", command])]
    assert first[0] == code
    assert others == [first, first]
    assert first[2].count("\n") == 1
    assert code == 2 or first[2] == FULL, "`plan --help` gave 0"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiledseg {VERSION}\n"


SMALL = ["--model.levels", "2", "--model.base_channels", "2", "--train.epochs", "1"]
BATCH = ["--model.norm", "batch", "--tiling.grid", "4", "--parallel.exact", "false"]
PLANS = ("--show all", "--scaling 64:128 --machine h100", "--search --gpus 64 --machine h100 --emit slurm")
PLANS += ("--gpu-memory 2GiB --images 100 --show all", "--stages 6 --schedule folded --show all")
TERMINAL = """import json, sys
from tiledseg.cli import main
for words in json.loads(sys.argv[1]):
    print("code", main(words))
"""


def shown_on_a_terminal(tmp_path: Path, lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a pseudo-terminal of 80 columns on which one process runs these commands."""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 80))
    words, environ = [sys.executable, "-c", TERMINAL, json.dumps(lines)], clean_environment()
    environ.pop("COLUMNS", None)
    with subprocess.Popen(words, cwd=tmp_path, env=environ, stdin=end, stdout=end, stderr=end):
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's end, where no process has it any more
            while part := os.read(terminal, 2**16):
                shown += part
    os.close(terminal)
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*\w", "", shown.decode()))


def test_all_that_is_printed_has_80_columns_on_a_terminal(tmp_path: Path) -> None:
    """All helps, those of each key and group among them; the helps' examples one after the other; warnings, errors."""
    for library in ("matplotlib", "onnxruntime", "onnxscript"):
        pytest.importorskip(library)
    helps = [[command, "--help"] for command in COMMANDS]
    helps += [["--help"], *([*words, "all"] for words in helps)]
    helps += [["train", "--help", name] for name in (*KEYS, *GROUPS)]
    shown = shown_on_a_terminal(tmp_path, helps)
    examples = [shown[number + 1].split()[1:] for number, line in enumerate(shown) if line == "example:"]
    for words in (examples := examples[: len(COMMANDS)]):
        words += SMALL * (words[0] == "train")
    plans = [f"plan --size 10000 --grid 8 {more}".split() for more in PLANS]
    batch = ["--config", "runs/run/config.yaml", *BATCH]
    wrong = [["plan", "--sizee", "9"], ["trian"], ["train", *batch[:-2], "--run.output", "b"]]
    shown += shown_on_a_terminal(tmp_path, [*examples, *plans, ["doctor", "--rehearse", *batch], *wrong])
    codes = [line.split()[1] for line in shown if line.startswith("code ")]
    assert codes == ["0"] * (len(helps) + len(COMMANDS) + len(plans) + 1) + ["2"] * len(wrong)
    assert [line for line in shown if len(line) > 80] == []
    assert [line.split()[:3] for line in shown if "model.norm is batch" in line] == [
        ["warning:", "not", "exact:"],
        ["error:", "model.norm", "is"],
    ]


def test_the_commands_are_the_modules_that_run() -> None:
    runnable = {path.stem for path in PACKAGE.glob("*.py") if "\nif __name__ ==" in path.read_text()}
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


CLOSED = "error: cannot write standard output: it is closed; send it to a file, or to /dev/null\n"


def shell(redirected: str, command: Sequence[str]) -> tuple[int, str, str]:
    """`python -m tiledseg.COMMAND` with its output redirected as a shell does."""
    return ended(["-m", f"tiledseg.{command[0]}", *command[1:]], redirected)


def test_a_closed_output() -> None:
    """It gave a traceback; and the next file opened had its number."""
    code, _, err = shell(">&-", ["plan", "--help"])
    assert (code, err) == (1, CLOSED)
    assert shell("2>&-", ["plan", "--sizee", "1000"])[:2] == (2, "")


def test_a_full_standard_error_changes_no_code(material: Material) -> None:
    """Bad input gave 1; a run would have ended for a line of progress."""
    assert shell("2> /dev/full", ["plan", "--sizee", "1000"])[0] == 2
    folder = material.root / "told"
    command = [*material.train_command(folder), "--run.verbosity", "2"]
    assert shell("> /dev/full 2>&1", command) == (0, "", "")
    assert find_checkpoint(folder).saved.step == 12


def test_a_store_is_whole_though_its_summary_is_lost(material: Material) -> None:
    """It gave 0 and no word."""
    path = material.root / "tiles.h5"
    cut = ("--grid", "2", "--levels", "2", "--output", str(path))
    code, _, err = shell("> /dev/full", ["tile", "--images", str(material.root / "one.tif"), *cut])
    assert (code, err) == (1, FULL)
    assert is_tile_store(str(path))
