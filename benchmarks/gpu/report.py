"""The table of the README, made of the battery's lines; where there are none it says what has not been measured.

    python -m benchmarks.gpu.report [FOLDER] [--write]

FOLDER holds the lines of a run (without it: those that are kept beside this program). `--write` keeps them, and puts
the table between its marks in README.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from benchmarks.gpu.figures import FIGURES, Figure, Lines
from benchmarks.gpu.lines import FILE, read_lines

HERE = Path(__file__).parent
MEASURED = HERE / "measured"  # the lines of the run that the pages tell of; not there before a GPU has made some
PAGES = (HERE / "README.md",)
BEGIN, END = "<!-- figures of a GPU: by benchmarks.gpu.report -->", "<!-- end of figures -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--write", action="store_true", help="keep the lines, and put the table into README.md")
    options = parser.parse_args()
    lines = read_lines(options.folder)
    if options.folder != MEASURED and not lines:
        print(f"error: {options.folder / FILE} has no line; give the folder of a run", file=sys.stderr)
        return 2
    if options.write and lines and device_of(lines) is None:
        print(f"error: {options.folder / FILE} is not of a GPU; its times say nothing of one", file=sys.stderr)
        return 2
    print(table(lines))
    if options.write:
        keep(options.folder, lines)
    return 0


def keep(folder: Path, lines: Lines, measured: Path = MEASURED, pages: tuple[Path, ...] = PAGES) -> None:
    """The lines beside this program, and the table in all pages."""
    if folder != measured:
        measured.mkdir(exist_ok=True)
        shutil.copy(folder / FILE, measured / FILE)
    for page in pages:
        page.write_text(with_table(page.read_text(), table(lines)))


def with_table(page: str, made: str) -> str:
    """The page with the table between its marks. Raises ValueError where it has none."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no {BEGIN}")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def table(lines: Lines) -> str:
    """A row a figure: what is promised, what was measured, and whether it keeps the promise."""
    device = device_of(lines)
    heading = f"Measured on {device}." if device else "**No GPU has run the battery, so none of these figures exists.**"
    rows = [row(figure, lines if device else ()) for figure in FIGURES]
    return "\n".join([heading, "", "| figure | promised | measured |", "| --- | --- | --- |", *rows])


def row(figure: Figure, lines: Lines) -> str:
    value = figure.found(lines)
    if value is None:
        measured = f"not measured: {figure.reason(lines)}" if lines else "not measured"
    else:
        measured = figure.shown.format(value) + ("" if figure.keeps(value) else ", **promise not kept**")
    return f"| {figure.what} | {figure.promise} | {measured} |"


def device_of(lines: Lines) -> str | None:
    """The GPU and the versions that ran; None where there are no lines, or of a CPU."""
    told = {line["name"]: line["value"] for line in lines if line["part"] == "versions" and line["state"] == "ok"}
    if "device" not in told or told["device"]["name"] == "CPU":
        return None
    versions = told.get("versions", {})
    return f"one {told['device']['name']}, torch {versions.get('torch', '?')}, commit {versions.get('commit', '?')}"


if __name__ == "__main__":
    sys.exit(main())
