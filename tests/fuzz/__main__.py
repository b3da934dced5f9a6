"""`python -m tests.fuzz --cases 10000 --seed 1`: random damage of all kinds against every command, and a table of what
came of it. One case again: `python -m tests.fuzz --seed 1 --case 37`. `--plants`: planted faults have to be found."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.driver import KINDS, Workshop, missed, run_cases, warm_up
from tests.fuzz.trial import make_pristine


def main() -> int:
    """Prints the table and every fault with the command that shows it again; exit 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone, of all kinds or of --kind")
    parser.add_argument("--kind", choices=tuple(KINDS), help="cases of one kind only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--plants", action="store_true", help="plant faults first, each of which has to be found")
    flags = parser.parse_args()
    kinds = (flags.kind,) if flags.kind else tuple(KINDS)
    again = f"python -m tests.fuzz --seed {flags.seed}" + (f" --kind '{flags.kind}'" if flags.kind else "")
    warm_up()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name)
        make_pristine(root)
        if flags.plants and missed(Workshop(root)):
            return 1
        if flags.case is not None:
            print(Workshop(root).run(flags.seed, flags.case, kinds))
            return 0
        results = run_cases(root, flags.seed, range(flags.cases), kinds, flags.jobs)
    faulty = [result for result in results if result.faults]
    for result in faulty:
        print(f"{again} --case {result.number}: {result.kind}: {result.words}")
        print("\n".join(f"    {line}" for line in (*result.faults, result.said)))
    print(f"{again} --cases {flags.cases}, {flags.jobs} processes on {len(os.sched_getaffinity(0))} cores")
    for kind in (*kinds, "all"):
        own = [result for result in results if kind in ("all", result.kind)]
        ends = ", ".join(f"{count} x {word}" for word, count in sorted(Counter(r.outcome for r in own).items()))
        longest = max((result.seconds for result in own), default=0.0)
        print(f"| {kind} | {len(own)} | {ends} | {sum(bool(r.faults) for r in own)} faults | {longest:.1f} s |")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
