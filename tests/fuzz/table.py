"""The table of a run: cases by kind and outcome, for people and for benchmarks/faults/README.md."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.driver import Result

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
