"""Other libraries and this one on the same work: what each can compute, to what exactness, and at what cost.

    python -m benchmarks.side_by_side [--only PART ...] [--peers NAME ...] [--items NAME ...]

Parts: `layers` and `networks` on 2 ranks, `cost` on 2 and 4, `maps`, `pipelines`. Each case is a process with a time
limit. A part's results replace its old ones in `measured.json`, of which the pages README.md and tables.md are made.
Peers come into `build/peers` by pip; one that cannot be had has a row with the reason (`peers.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import Done, python, run_process
from benchmarks.side_by_side import maps, page, pipelines
from benchmarks.side_by_side.layers import LAYERS, NETWORK_NAMES
from benchmarks.side_by_side.peers import PEERS, environment
from benchmarks.side_by_side.spatial import LIMIT, STEPS, lines_of
from tiledseg.errors import CommunicationError

HERE = Path(__file__).parent
COSTS = ("chain of convolutions", "U-Net")
PARTS = ("layers", "networks", "cost", "maps", "pipelines")
AT_ONCE = 8  # items of a process, after which results are written
Results = dict[str, Any]


def run(module: str, *words: str, limit: float) -> Done:
    """Run a program of this folder, with the packages of the peer that its first word names on its path. An end by its
    limit is as good as an error."""
    try:
        return run_process(python(f"benchmarks.side_by_side.{module}", *words), limit, environment(words[0]))
    except CommunicationError as error:
        return Done(1, "", str(error))


def lines(done: Done) -> Iterator[Results]:
    yield from (json.loads(line) for line in done.out.splitlines() if line.startswith("{"))


def last(done: Done) -> Results:
    return next(iter([*lines(done)][::-1]), {"error": done.err.strip().splitlines()[-1:] or "no result"})


def spatial(kind: str, peer: str, ranks: int, items: list[str]) -> Results:
    """Return the results of items by one peer; an item after which its process ended is named as such."""
    found: Results = {}
    while left := [item for item in items if item not in found]:
        done = run("spatial", peer, kind, str(ranks), *left, limit=60 + (LIMIT + 10) * len(left))
        news = {line.pop("item"): line for line in lines(done)}
        found |= news or {left[0]: {"error": f"its process ended: {done.reason}"}}
    return found


def of_part(part: str, options: argparse.Namespace, old: Results) -> Iterator[Results]:
    """Give the part's results as they become more."""
    found: Results = old if options.peers or options.items else {}
    if part in ("layers", "networks", "cost"):
        every = {"layers": list(LAYERS), "networks": NETWORK_NAMES, "cost": list(COSTS)}[part]
        items = [item for item in every if item in (options.items or every)]
        for peer in [peer for peer in STEPS if peer in (options.peers or STEPS)]:
            if peer in PEERS and not PEERS[peer].version:
                found[peer] = {}
            elif part == "cost":
                counts = {str(ranks): spatial("cost", peer, ranks, items) for ranks in (2, 4)}
                found[peer] = {**counts, "lines": lines_of(peer)}
            else:
                for first in range(0, len(items), AT_ONCE):
                    some = spatial("capability", peer, 2, items[first : first + AT_ONCE])
                    found[peer] = found.get(peer, {}) | some
                    yield found
            yield found
    elif part == "pipelines":
        for peer in pipelines.PIPELINES:
            found[peer] = last(run("pipelines", peer, limit=pipelines.LIMIT))
            yield found
    else:
        yield of_maps(options.side, options.repeats)


def of_maps(side: int, repeats: int) -> Results:
    """Map the scene in each way by turns."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = run("maps", folder, "prepare", str(side), limit=300)
        if prepared.code:
            return {"error": prepared.reason}
        turns = [{way: last(run("maps", folder, way, limit=120)) for way in maps.WAYS} for _ in range(repeats)]
    found: Results = {}
    for way in maps.WAYS:
        good = [turn[way] for turn in turns if "seconds" in turn[way]]
        found[way] = turns[0][way]
        if len(good) == repeats:
            base = maps.CROPS if "crops" in way else maps.EXACT
            over = [turn[way]["cpu"] / turn[base]["cpu"] for turn in turns if "cpu" in turn[base]]
            found[way] |= {key: statistics.median(each[key] for each in good) for key in ("seconds", "cpu", "MiB")}
            found[way]["ratio"] = over
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--peers", nargs="+", choices=tuple(STEPS), help="of layers, networks and cost")
    parser.add_argument("--items", nargs="+", help="layers or networks by name (default: all)")
    parser.add_argument("--side", type=int, default=2048, help="pixels a side of the mapped scene")
    parser.add_argument("--repeats", type=int, default=3, help="turns of maps")
    parser.add_argument("--folder", type=Path, default=HERE, help="of measured.json and the pages")
    parser.add_argument("--page", action="store_true", help="make the pages of what is measured")
    options = parser.parse_args(arguments)
    file = options.folder / "measured.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for part in () if options.page else options.only:
        begun = time.monotonic()
        for found in of_part(part, options, results.get(part, {})):
            results[part] = found
            write(file, results)
        took = round(time.monotonic() - begun)
        results[f"{part}: measured"] = f"{time.strftime('%Y-%m-%d')}, {took} s, load {os.getloadavg()[0]:.1f}"
        print(f"{part}: {took} s", file=sys.stderr)
    if not options.page:
        known, asked = results.get("versions", {}), (set(PEERS) if options.peers is None else set(options.peers))
        results["versions"] = known | {name: peer.version for name, peer in PEERS.items() if name in asked}
        results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        write(file, results)
    for name, text in page.pages(results).items():
        (options.folder / name).write_text(text)
    return 0


def write(file: Path, results: Results) -> None:
    """Write a part a line."""
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    raise SystemExit(main())
