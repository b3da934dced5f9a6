"""`python -m benchmarks.faults --cases 300 --seed 0`: random faults befall small runs, which then go on.

Each case is drawn by its seed and number: a kind of fault, its moment, one rank or several. Ranks are forks of a
process that has imported everything; some cases go through mpirun, from the start of their processes. The run meets its
fault under a limit of time; the fault is taken away, and the run goes on; where a node is lost, on the ranks that are
left. A table by kind, and every case that failed with what was wrong; exit 1 where one did. `--keep FILE` keeps
results: the same call goes on from them, and other cases may be added to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.case import Result, Workshop
from benchmarks.faults.table import table
from benchmarks.forks import import_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="how many (300)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (0)")
    parser.add_argument("--keep", type=Path, help="file of results, a line a case, which are not run again")
    flags = parser.parse_args()
    import_all()
    results = read_results(flags.keep)
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        workshop = Workshop(Path(root))
        for number in range(flags.first, flags.first + flags.cases):
            if number not in results:
                results[number] = result = workshop.run(flags.seed, number)
                _keep(flags.keep, result)
    found = [results[number] for number in sorted(results)]
    print(table(found))
    faulty = [result for result in found if result.faults]
    for result in faulty:
        print(
            f"--seed {flags.seed} --first {result.number} --cases 1: "
            f"{result.kind}, {result.ranks} ranks: {result.words}"
        )
        print("".join(f"    {fault}\n" for fault in result.faults) + f"    exit {result.code}: {result.said}")
    return 1 if faulty else 0


def read_results(path: Path | None) -> dict[int, Result]:
    """Results by the numbers of their cases; none where there is no such file."""
    if path is None or not path.exists():
        return {}
    found = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return {result.number: result for result in found}


def _keep(path: Path | None, result: Result) -> None:
    """One write, so that two programs may add to the same file."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
