"""`python -m benchmarks.many_ranks --ranks 64`: trains on so many ranks of this machine in every way, and on one rank.

Each rank is a fork that runs the command's own code over Gloo, from the rendezvous to its exit. A row for each way:
seconds from the first fork to the last exit, the most memory of all together (shared pages counted once), sockets that
were open, and how far losses and last weights are from those of one rank. Exit 1 where they are further than the order
of sums explains, or where a rank has said anything.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.forks import Outcome, import_all
from benchmarks.many_ranks.cases import Case, cases, distance, make_scene, train
from benchmarks.many_ranks.ranks import Looks

ORDER_OF_SUMS = 1e-11
_HEAD = (
    "| way | seconds | memory of all | sockets of rank 0 | of another, most | of all | losses apart | weights apart |"
    "\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="the square of an even number (64)")
    parser.add_argument("--only", nargs="+", help="names of ways (all)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each way (300)")
    flags = parser.parse_args()
    import_all()
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        root = Path(name)
        make_scene(root, flags.ranks)
        wanted = [case for case in cases(flags.ranks) if flags.only is None or case.name in flags.only]
        print(_HEAD, flush=True)
        faults = [fault for case in wanted for fault in _run(root, case, flags.ranks, flags.limit)]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def _run(root: Path, case: Case, ranks: int, limit: float) -> list[str]:
    """Prints the case's row; what is wrong with it."""
    alone = "alone " + " ".join(case.batch)
    if not (root / alone).exists():
        train(root, alone, 1, case.batch, limit, Looks())
    looks = Looks()
    ends = train(root, case.name, ranks, (*case.batch, *case.parallel), limit, looks)
    apart = distance(root / case.name, root / alone)
    print(_row(case.name, ends, looks, f"{apart.losses:.0e} | {apart.weights:.0e}"), flush=True)
    told = [re.sub(r"^\[Gloo\].*\n?", "", end.out + end.err, flags=re.MULTILINE) for end in ends]  # under torch 2.8
    faults = [f"{case.name}: rank {rank} says {said}" for rank, said in enumerate(told) if said.strip()]
    return faults + ([f"{case.name}: {apart}"] if apart.largest > ORDER_OF_SUMS else [])


def _row(name: str, ends: list[Outcome], looks: Looks, apart: str) -> str:
    first, *others = (looks.sockets[rank] for rank in range(len(ends)))
    seconds, memory = max(end.seconds for end in ends), f"{looks.peak_bytes / 2**30:.1f} GiB"
    return f"| {name} | {seconds:.0f} | {memory} | {first} | {max(others)} | {first + sum(others)} | {apart} |"


if __name__ == "__main__":
    sys.exit(main())
