"""Trees in the imagery of a city that training never sees: an ablation, with several seeds a row.

    python -m benchmarks.naip_trees --data FOLDER --out FOLDER [--rows NAME ...] [--seeds 3] [--steps 552]
    python -m benchmarks.naip_trees --data FOLDER --out FOLDER --maps | --report

FOLDER of --data holds the four files of the NAIP mosaics (`cities.py` names them; README.md says whose they are).
They are not in this repository: where they are not, the program says so and ends with 3.

The first form trains what is not yet in --out, seed after seed, each row of `rows.yaml` for the same number of steps,
and prints the score of each on held-out blocks of Santa Monica. Ended at any time, it goes on where it was. Choices are
made on these scores; `--maps` adds those of the ways to map (`maps.py`). `--report` then maps Long Beach by each run,
once, and prints the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launching import NOT_RUNNABLE, NotRunnableError
from benchmarks.naip_trees import table
from benchmarks.naip_trees.cities import LEARNT, OTHER, missing
from benchmarks.naip_trees.maps import score_all
from benchmarks.naip_trees.rows import ROWS, read_rows
from benchmarks.naip_trees.runs import Place, train_row
from tiledseg.errors import ConfigError, TiledsegError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.naip_trees", description="An ablation on real imagery.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=552)
    parser.add_argument("--limit", type=float, default=1800, help="seconds a run may take")
    parser.add_argument("--file", type=Path, default=ROWS, help="the rows (default: rows.yaml beside this program)")
    parser.add_argument("--maps", action="store_true", help="map the held-out blocks by each run that is there")
    parser.add_argument("--report", action="store_true", help="map the other city by each run that is there, once")
    options = parser.parse_args(arguments)
    absent = missing(options.data)
    if absent:
        print(f"not runnable: {options.data} has no {absent[0]}", file=sys.stderr)
        return NOT_RUNNABLE
    try:
        _run(options)
    except NotRunnableError as error:
        print(f"not runnable: {error}", file=sys.stderr)
        return NOT_RUNNABLE
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(table.of_folder(options.out, options.report))
    return 0


def _run(options: argparse.Namespace) -> None:
    place = Place(options.data, options.out, options.limit)
    if options.maps or options.report:
        score_all(place, OTHER if options.report else LEARNT)
        return
    rows = read_rows(options.file)
    names = options.rows or list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise ConfigError(f"{options.file} has no row {unknown[0]}; give some of {', '.join(rows)}")
    for seed in range(options.seeds):
        for name in names:
            print(train_row(place, name, rows[name], seed, options.steps), flush=True)


if __name__ == "__main__":
    sys.exit(main())
