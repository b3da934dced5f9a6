"""Other libraries and this one on the same work: what each can compute, to what exactness, and at what cost.

    python -m benchmarks.side_by_side [--only PART ...] [--peers NAME ...] [--items NAME ...]

Parts: `layers` and `networks` on 2 ranks, `cost` on 2 and 4, `maps`, `pipelines`. Each case is a process with a time
limit. Results replace old ones in `measured.json`, of which the pages README.md and tables.md are made.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.launching import mpirun, python, run_process
from benchmarks.side_by_side import maps, page, pipelines
from benchmarks.side_by_side.layers import COSTS, LAYERS
from benchmarks.side_by_side.peers import PEERS, environment
from benchmarks.side_by_side.spatial import LIMIT, STEPS, found_of
from tiledseg.errors import CommunicationError

HERE = Path(__file__).parent
ITEMS = {"layers": list(LAYERS), "networks": list(NETWORKS), "cost": list(COSTS)}
Results = dict[str, Any]


def run(module: str, *words: str, limit: float) -> list[Results]:
    """Return the lines of a program of this folder, with the packages of peers on its path, and its error, if any."""
    start = partial(mpirun, int(words[2])) if words[0] == "DistDL" else python
    try:
        done = run_process(start(f"benchmarks.side_by_side.{module}", *words), limit, environment(words[0]))
    except CommunicationError as error:
        return [{"error": str(error)}]
    return found_of([done.code], [f"{done.out}\n{done.err}"])


def spatial(kind: str, peer: str, ranks: int, items: list[str]) -> Results:
    """Return the results of items by one peer; an item after which its process ended is named as such."""
    found: Results = {}
    while left := [item for item in items if item not in found]:
        for line in run("spatial", peer, kind, str(ranks), *left, limit=90 + LIMIT * len(left)):
            found[line.pop("item", next((item for item in left if item not in found), ""))] = line
    return found


def of_part(part: str, options: argparse.Namespace, old: Results) -> Iterator[Results]:
    """Give the part's results as they become more."""
    found: Results = old if options.peers or options.items else {}
    if part == "maps":
        yield of_maps()
    elif part == "pipelines":
        for peer in pipelines.MAKERS:
            yield (found := found | {peer: run("pipelines", peer, limit=90 + LIMIT)[-1]})
    else:
        items = [item for item in ITEMS[part] if item in (options.items or ITEMS[part])]
        for peer in [peer for peer in STEPS if peer in (options.peers or STEPS)]:
            found[peer] = found.get(peer, {}) if options.items else {}
            for ranks in (2, 4) if part == "cost" else (2,):
                if peer not in PEERS or PEERS[peer].version:
                    runs = spatial("cost" if part == "cost" else "capability", peer, ranks, items)
                    found[peer] |= {f"{key}, {ranks} ranks" if part == "cost" else key: runs[key] for key in runs}
                yield found


def of_maps() -> Results:
    """Map the scene in each way in three turns."""
    with tempfile.TemporaryDirectory() as folder:
        run("maps", folder, "prepare", limit=300)
        turns = [{way: run("maps", folder, way, limit=120)[-1] for way in maps.WAYS} for _ in range(3)]
    found = turns[0]
    for way, each in found.items():
        good, base = [turn for turn in turns if "seconds" in turn[way]], maps.base_of(way)
        each |= {key: statistics.median(turn[way][key] for turn in good) for key in ("seconds", "cpu", "MiB") if good}
        each["ratio"] = [round(turn[way]["cpu"] / turn[base]["cpu"], 3) for turn in good if "cpu" in turn[base]]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=page.PARTS, default=page.PARTS)
    parser.add_argument("--peers", nargs="+", choices=tuple(STEPS), help="of layers, networks and cost")
    parser.add_argument("--items", nargs="+", help="layers or networks by name (default: all)")
    parser.add_argument("--folder", type=Path, default=HERE, help="of measured.json and the pages")
    parser.add_argument("--page", action="store_true", help="make the pages of what is measured")
    options = parser.parse_args(arguments)
    file = options.folder / "measured.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    if not options.page:
        old, asked = results.get("versions", {}), options.peers or PEERS
        results["versions"] = {name: PEERS[name].version if name in asked else old.get(name, "") for name in PEERS}
        results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    for part in () if options.page else options.only:
        begun = time.monotonic()
        for found in of_part(part, options, results.get(part, {})):
            results[part] = found
            write(file, results)
        minutes, load = round((time.monotonic() - begun) / 60, 1), round(os.getloadavg()[0], 1)
        results["times"] = results.get("times", {}) | {part: [minutes, load, time.strftime("%Y-%m-%d %H:%M")]}
        print(f"{part}: {minutes} minutes, load {load}", file=sys.stderr)
        write(file, results)
    for name, text in page.pages(results).items():
        (options.folder / name).write_text(text)
    return 0


def write(file: Path, results: Results) -> None:
    """Write a line a peer of each part, and one of each other thing."""
    text = {key: json.dumps(value) for key, value in results.items()}
    for part in results.keys() & page.PARTS:
        lines = (f"{json.dumps(peer)}: {json.dumps(found)}" for peer, found in results[part].items())
        text[part] = "{" + ",\n ".join(lines) + "}"
    file.write_text("{\n" + ",\n".join(f'"{key}": {value}' for key, value in text.items()) + "\n}\n")


if __name__ == "__main__":
    raise SystemExit(main())
