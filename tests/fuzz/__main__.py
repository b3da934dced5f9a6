"""`python -m tests.fuzz --cases 10000 --seed 1`: random damage of all kinds against every command, and a table of what
came of it. One case again: `python -m tests.fuzz --seed 1 --case 37`. `--plants`: planted faults have to be found."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.driver import KINDS, Result, Workshop, missed, run_cases, warm_up
from tests.fuzz.trial import make_pristine


def main() -> int:
    """Prints the table and every fault with the command that shows it again; exit 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone, of all kinds or of --kind")
    parser.add_argument("--kind", choices=tuple(KINDS), help="cases of one kind only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--page", type=Path, help="benchmarks/faults/README.md, whose table this run becomes")
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
    text = table(results, f"{again} --cases {flags.cases}", flags.jobs)
    print(text)
    if flags.page:
        put_table(flags.page, text)
    return 1 if faulty else 0


BEGIN, END = "<!-- table: written by python -m tests.fuzz -->", "<!-- end of table -->"


def table(results: Sequence[Result], command: str, jobs: int) -> str:
    """Markdown: a row a kind, a column an outcome."""
    outcomes = sorted({result.outcome for result in results})
    kinds = list(dict.fromkeys(result.kind for result in sorted(results, key=lambda result: result.number)))
    counts = Counter((result.kind, result.outcome) for result in results)
    heads = [f"exit {word}" if word[0].isdigit() else word for word in outcomes]
    rows = [["kind", "cases", *heads, "faults", "longest"]]
    rows.append(["---"] * len(rows[0]))
    for kind in (*kinds, "all"):
        own = [result for result in results if kind in ("all", result.kind)]
        faults = sum(bool(result.faults) for result in own)
        found = [sum(counts[name, word] for name in kinds if kind in ("all", name)) for word in outcomes]
        longest = max(result.seconds for result in own)
        rows.append([kind, str(len(own)), *map(str, found), str(faults), f"{longest:.1f} s"])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    seconds = sum(result.seconds for result in results)
    head = f"`{command}`, {jobs} processes on {len(os.sched_getaffinity(0))} cores, {seconds:.0f} s in the cases."
    return "\n".join([head, "", *lines])


def put_table(page: Path, text: str) -> None:
    """Puts the table between its marks on the page."""
    whole = page.read_text()
    before, after = whole[: whole.index(BEGIN) + len(BEGIN)], whole[whole.index(END) :]
    page.write_text(f"{before}\n{text}\n{after}")


if __name__ == "__main__":
    sys.exit(main())
