"""A U-Net cut into stages: this project's pipeline beside one process, torch.distributed.pipelining and torchgpipe.

    python -m benchmarks.pipeline [--torchgpipe-path DIR] [--parts ceiling contest] [--json FILE]

Starts its own jobs, one thread a rank, and lets them take turns; prints tables in markdown. Every job holds its
gradients against a serial run in float64 before it times anything; where ours differ by more than rounding, or one of
ours fails, the exit code is 1. See README.md for what is measured and what two cores can show.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts import run_parts
from benchmarks.pipeline.ceiling import ceiling_table, measure_ceiling
from benchmarks.pipeline.contestants import CHANNELS_LAST, KEPT_MEMORY, SERIAL, Contestant, contestants, finder
from benchmarks.pipeline.tables import account_table, rows, side_by_side_table
from benchmarks.pipeline.turns import Turns, find_balance, take_turns
from tiledseg.errors import ConfigError

PARTS = ("ceiling", "contest")
BASE, OURS = "one process, channels last", "tiledseg, 1f1b"


def main() -> int:
    options = _parser().parse_args()
    try:
        _check(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return run_parts(options, PROGRAMS, _workload(options))


def _ceiling(options: argparse.Namespace) -> tuple[str, Any]:
    flags = {"micro-batches": options.ceiling_micro_batches, "repeat": options.ceiling_pairs, "layout": CHANNELS_LAST}
    words = (*_network(options), "--stages", "1", *(word for k, v in flags.items() for word in (f"--{k}", str(v))))
    answer = measure_ceiling(options.stages, words, options.limit, _environment(options))
    return ceiling_table(answer), answer


def _contest(options: argparse.Namespace) -> tuple[str, Any]:
    effort = ("--repeat", str(options.steps), "--warm-up", str(options.warm_up))
    flags = (*_network(options), "--micro-batches", str(options.micro_batches), *effort)
    everyone = _chosen(contestants(options.stages, options.torchgpipe_path), tuple(options.who))
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(flags, (), options.turns, options.limit, Path(folder), _environment(options))
        balance = tuple(options.balance or find_balance(finder(options.stages), turns))
        found = take_turns(everyone, replace(turns, balance=balance))
    result = rows(found, BASE, OURS)
    tables = [f"Balance that all share: {list(balance)}", side_by_side_table(result), account_table(result)]
    return "\n\n".join(tables), {"balance": balance, "rows": result}


def _chosen(everyone: Sequence[Contestant], names: tuple[str, ...]) -> list[Contestant]:
    """Those asked for, ours, and one process of each layout among them, which says what rounding may do."""
    asked = [one for one in everyone if one.name in (BASE, OURS) or one.name.startswith(names)]
    layouts = {one.layout for one in asked}
    return [one for one in everyone if one in asked or (one.program == SERIAL and one.layout in layouts)]


PROGRAMS = {"ceiling": _ceiling, "contest": _contest}


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError where nothing would be measured."""
    for name in ("turns", "steps", "ceiling_pairs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")


def _network(options: argparse.Namespace) -> list[str]:
    names = ("size", "levels", "base_channels", "dtype")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def _environment(options: argparse.Namespace) -> dict[str, str]:
    return KEPT_MEMORY if options.freed_memory == "kept" else {}


def _workload(options: argparse.Namespace) -> str:
    return (
        f"U-Net L = {options.levels}, {options.base_channels} base channels, {options.micro_batches} micro-batches of "
        f"{options.size} px, {options.dtype}, {options.stages} stages, one thread a rank, {os.cpu_count()} cores, "
        f"freed memory {options.freed_memory}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--who", nargs="+", default=[""], help="beginnings of the names of those who take part")
    parser.add_argument("--size", type=int, default=192, help="pixels a side of a micro-batch's image")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--balance", type=int, nargs="+", help="that all share; without it, ours finds one")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each contestant")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a job, after the one that is compared")
    parser.add_argument("--warm-up", type=int, default=0, help="more steps in front of them")
    parser.add_argument("--ceiling-pairs", type=int, default=5)
    parser.add_argument("--ceiling-micro-batches", type=int, default=4)
    parser.add_argument("--freed-memory", choices=("kept", "returned"), default="kept", help="by the C library")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a job is ended")
    parser.add_argument("--torchgpipe-path", help="a checkout of torchgpipe, to go on PYTHONPATH")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
