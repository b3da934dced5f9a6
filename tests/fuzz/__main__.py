"""`python -m tests.fuzz --cases 10000 --seed 1`: random damage of all kinds against every command, and a table of what
came of it. One case again: `python -m tests.fuzz --seed 1 --case 37`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.driver import KINDS, Workshop, run_cases, warm_up
from tests.fuzz.table import put_table, table


def main() -> int:
    """Prints the table and every fault with the command that shows it again; exit 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone, of all kinds or of --kind")
    parser.add_argument("--kind", choices=tuple(KINDS), help="cases of one kind only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--page", type=Path, help="benchmarks/faults/README.md, whose table this run becomes")
    flags = parser.parse_args()
    kinds = (flags.kind,) if flags.kind else tuple(KINDS)
    again = f"python -m tests.fuzz --seed {flags.seed}" + (f" --kind '{flags.kind}'" if flags.kind else "")
    warm_up()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        if flags.case is not None:
            print(Workshop(Path(root)).run(flags.seed, flags.case, kinds))
            return 0
        results = run_cases(Path(root), flags.seed, range(flags.cases), kinds, flags.jobs)
    faulty = [result for result in results if result.faults]
    for result in faulty:
        print(f"{again} --case {result.number}: {result.kind}: {result.words}")
        for fault in result.faults:
            print(f"    {fault}")
        print(f"    {result.said}")
    text = table(results, f"{again} --cases {flags.cases}", flags.jobs)
    print(text)
    if flags.page:
        put_table(flags.page, text)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
