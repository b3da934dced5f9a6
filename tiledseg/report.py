"""`tiledseg report --run runs/first`: makes the page of a run from the files in its folder."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.report")

from collections.abc import Sequence
from pathlib import Path

from tiledseg.commands.options import parse
from tiledseg.commands.parser import Parser, command
from tiledseg.errors import OutputError
from tiledseg.system.console import answer
from tiledseg.system.outputs import METRICS, PAGE, check_ending, check_outputs, files_below, whole
from tiledseg.training.run_page import write_report


def build_parser() -> Parser:
    parser = Parser(
        "tiledseg report",
        "--run runs/run --output run.html",
        description="Make the page of a run, one HTML file that opens anywhere.",
    )
    parser.add_argument("--run", type=str, required=True, help="folder of a run, finished or not")
    parser.add_argument("--output", type=str, help=f"HTML file to write ({PAGE} in the run's folder)")
    return parser


@command
def main(words: Sequence[str]) -> None:
    """Write the page and print its path."""
    options = parse(build_parser(), words)
    folder = Path(options.run)
    if not (folder / METRICS).is_file():
        raise OutputError(f"--run is {options.run}, but there is no {METRICS} in it; give the folder of a run")
    output = Path(options.output) if options.output is not None else folder / PAGE
    own = [file for file in files_below(folder) if file.name != PAGE or file.parent != folder]
    check_outputs([whole("--output", options.output or output)], [*own, *options.config], folder)
    check_ending("--output", str(output), ".html", ".htm")
    write_report(folder, output)
    answer(str(output))
